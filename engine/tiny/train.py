"""Train the embedded checkpoint on one GPU, inside a budget of minutes.

    python -m engine.tiny.train --data .tiny --out OUT

The schedule follows the clock, not a number of steps, so that a run always ends in time with its learning rate
at zero: 1,024-token windows first, 4,096 from 65 % on, weights rounded to the 4-bit grid in the forward pass from
90 % on (gradients pass straight through). A run can be cut in two: ``--until 0.5 --state S`` and then
``--resume S``. The result is written in parts under 16 MiB each, in transformers' layout plus ``mtp.*``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import save_file
from torch import nn

from engine.config import ModelConfig
from engine.tiny.corpus import KINDS, load_ids
from engine.tiny.muon import Muon
from engine.tiny.network import TINY, DraftHead, Forward, build
from engine.tiny.rounding import bits_of, round_to_grid

PART = 15 * 2**20
"""Bytes of one part of the saved weights."""
MIX = {"code": 0.55, "prose": 0.37, "chat": 0.08}
"""Share of the windows of a step that come from each kind of text."""
DRAFT_WEIGHT, BALANCE_WEIGHT = 0.3, 0.01
"""Weights in the loss of the draft head, and of the load balance of each layer."""


@dataclass
class Plan:
    """What the schedule says at a share `progress` of the whole training."""

    length: int
    rate: float
    rounded: bool


def plan(progress: float, short: int = 1024, long: int = 4096) -> Plan:
    """Warm up over 1 %, stay flat to 45 %, then fall in a line to nothing."""
    rate = min(1.0, progress / 0.01 + 0.01) * min(1.0, max(0.0, (1 - progress) / 0.55))
    return Plan(short if progress < 0.65 else long, rate, progress >= 0.9)


class Windows:
    """Windows at random places of the token streams, mixed by kind; the streams live on the device."""

    def __init__(self, folder: Path, split: str, device: str, seed: int) -> None:
        with ThreadPoolExecutor() as pool:  # unpacking lets go of the interpreter lock
            streams = pool.map(lambda kind: load_ids(folder, split, kind).astype("int32"), KINDS)
            self.streams = {kind: torch.from_numpy(ids).to(device) for kind, ids in zip(KINDS, streams)}
        self.generator = torch.Generator().manual_seed(seed)

    def take(self, count: int, length: int, kind: str | None = None) -> torch.Tensor:
        """`count` windows of ``length + 2`` tokens, int64."""
        kinds = [kind] * count if kind else self._kinds(count)
        rows = []
        for name in sorted(set(kinds)):
            stream = self.streams[name]
            n = kinds.count(name)
            starts = torch.randint(0, len(stream) - length - 2, (n,), generator=self.generator)
            starts = starts.to(stream.device, non_blocking=True)
            rows.append(stream[starts[:, None] + torch.arange(length + 2, device=stream.device)])
        return torch.cat(rows).long()

    def _kinds(self, count: int) -> list[str]:
        drawn = torch.multinomial(torch.tensor(list(MIX.values())), count, True, generator=self.generator)
        return [list(MIX)[i] for i in drawn.tolist()]


# -- parameters ----------------------------------------------------------------------------------


def named(model: nn.Module, head: DraftHead) -> dict[str, nn.Parameter]:
    """Every parameter under the name it is saved by."""
    found = dict(model.named_parameters())
    found |= {f"mtp.{name}": p for name, p in head.named_parameters()}
    return found


def optimisers(parameters: dict[str, nn.Parameter], config: ModelConfig, fused: bool) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices inside layers; AdamW for embedding, output, router, convolution and vectors."""
    matrices: list[tuple[nn.Parameter, int]] = []
    kept: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, p in parameters.items():
        if p.ndim < 2 or "conv1d" in name or name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            vectors.append(p)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")):
            kept.append(p)
        elif name.endswith("gate_up_proj"):
            matrices.append((p, 2))
        elif name.endswith("q_proj.weight"):
            matrices.append((p, 2 * config.num_attention_heads))
        else:
            matrices.append((p, 1))
    # `shared_expert_gate` is one row and `mlp.gate` the router: both end in "gate.weight".
    groups = [{"params": kept, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    return Muon(matrices), torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, fused=fused)


@contextlib.contextmanager
def on_grid(parameters: dict[str, nn.Parameter], on: bool) -> Iterator[None]:
    """Inside, the matrices hold their 4- and 8-bit roundings; gradients taken there are the originals'."""
    held: list[tuple[nn.Parameter, torch.Tensor]] = []
    if on:
        with torch.no_grad():
            for name, p in parameters.items():
                bits = bits_of(name, tuple(p.shape))
                if bits:
                    held.append((p, p.detach().clone()))
                    p.copy_(round_to_grid(p, bits))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, original in held:
                p.copy_(original)


# -- saving --------------------------------------------------------------------------------------


def save(parameters: dict[str, nn.Parameter], config: ModelConfig, out: Path) -> None:
    """Write bfloat16 parts, their index and the nested ``config.json``."""
    out.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, p in parameters.items():
        value = p.detach().to("cpu", torch.bfloat16).contiguous()
        if size + value.nbytes > PART and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = value
        size += value.nbytes
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(v.nbytes for part in parts for v in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    saved = config.to_dict() | {"torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


# -- the run -------------------------------------------------------------------------------------


def validate(forward: Forward, windows: Windows, count: int, length: int, batch: int) -> dict[str, Any]:
    """Mean losses in nats for each kind, code by position, and how evenly experts are used.

    Gradients stay on and batches whole, so that the graphs compiled for training are the ones that run.
    """
    result: dict[str, Any] = {}
    windows.generator.manual_seed(2)  # the same windows every time
    for kind in KINDS:
        rows = windows.take(count, length, kind)
        found = []
        for start in range(0, count, batch):
            losses = forward.losses(rows[start : start + batch])
            found.append({name: value.detach() for name, value in losses.items()})
        result[kind] = round(torch.cat([f["next"] for f in found]).mean().item(), 4)
        result[f"{kind}_draft"] = round(torch.cat([f["draft"] for f in found]).mean().item(), 4)
        if kind == "code":
            by = torch.cat([f["next"] for f in found]).mean(0).unflatten(0, (8, -1)).mean(-1)
            result["code_by_eighth"] = [round(v, 3) for v in by.tolist()]
        share = torch.stack([f["share"] for f in found]).mean(0) * forward.config.num_experts
        result[f"{kind}_experts"] = [round(share.min().item(), 2), round(share.max().item(), 2)]
    return result


class Trainer:
    """One run: model, optimisers, data and log."""

    def __init__(self, options: argparse.Namespace, config: ModelConfig = TINY) -> None:
        self.options, self.config = options, config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_float32_matmul_precision("high")
        self.model, self.head = build(config)
        self.model.to(self.device)
        self.head.to(self.device)
        self.parameters = named(self.model, self.head)
        self.muon, self.adam = optimisers(self.parameters, config, fused=self.device == "cuda")
        self.forward = Forward(config, self.model, self.head)
        self.data = Windows(options.data, "train", self.device, seed=1)
        self.valid = Windows(options.data, "valid", self.device, seed=2)
        self.steps, self.tokens, self.start = 0, 0, 0.0
        self.log: list[dict[str, Any]] = []
        if options.resume:
            self.restore(torch.load(options.resume, map_location=self.device, weights_only=False))

    def autocast(self) -> Any:
        """bfloat16 products on a GPU, float32 on a CPU."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def state(self, progress: float) -> dict[str, Any]:
        """Everything a later run needs to go on."""
        return {
            "parameters": {n: p.detach().clone() for n, p in self.parameters.items()},
            "muon": {shape: b.clone() for shape, b in self.muon.state().items()},
            "adam": self.adam.state_dict(),
            "progress": progress,
            "steps": self.steps,
            "tokens": self.tokens,
            "log": self.log,
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Take up the state of an earlier run."""
        for name, p in self.parameters.items():
            p.copy_(state["parameters"][name])
        self.muon.buffers = {shape: b.clone() for shape, b in state["muon"].items()}
        self.adam.load_state_dict(state["adam"])
        self.steps, self.tokens, self.start = state["steps"], state["tokens"], state["progress"]
        self.log = state["log"]

    def note(self, **values: Any) -> None:
        """Print and keep one line of the log."""
        self.log.append(values)
        print(json.dumps(values), flush=True)

    def step(self, now: Plan) -> tuple[torch.Tensor, ...]:
        """One update on ``tokens_per_step`` tokens; the losses stay on the device."""
        window = self.data.take(max(1, self.options.tokens_per_step // now.length), now.length)
        with on_grid(self.parameters, now.rounded):
            with self.autocast():
                found = self.forward.losses(window)
                main, draft, balance = found["next"].mean(), found["draft"].mean(), found["balance"]
                layers = self.config.num_hidden_layers + 1
                loss = main + DRAFT_WEIGHT * draft + BALANCE_WEIGHT * layers * balance
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = self.options.adam_rate * now.rate
        self.adam.step()
        self.muon.step(self.options.muon_rate * now.rate)
        self.adam.zero_grad(set_to_none=True)
        for p in self.parameters.values():
            p.grad = None
        self.steps += 1
        self.tokens += window.shape[0] * now.length
        return main.detach(), draft.detach(), balance.detach(), norm

    def compile(self) -> None:
        """Compile the blocks for both lengths, or go on without where that fails or takes too long."""
        began = time.monotonic()
        plain = (self.forward.delta_block, self.forward.attention_block, self.forward.token_loss)
        saved = self.state(self.start)
        try:
            with limit(self.options.compile_seconds):
                torch._dynamo.config.cache_size_limit = 64
                self.forward.compile()
                for at in (0.5, 0.8):
                    now = plan(at, self.options.short, self.options.long)
                    self.step(Plan(now.length, 0.0, now.rounded))
                if self.device == "cuda":
                    torch.cuda.synchronize()
            self.note(compiled=True, seconds=round(time.monotonic() - began, 1))
        except Exception as error:  # any failure of the compiler is survivable: the eager blocks compute the same
            self.forward.delta_block, self.forward.attention_block, self.forward.token_loss = plain
            for p in self.parameters.values():
                p.grad = None
            self.note(compiled=False, why=repr(error)[:400], seconds=round(time.monotonic() - began, 1))
        self.muon.buffers.clear()
        self.restore(saved)
        if not self.start:
            self.muon, self.adam = optimisers(self.parameters, self.config, fused=self.device == "cuda")

    def run(self, began: float) -> None:
        """Train until the budget is spent, validating and saving about once a minute."""
        options = self.options
        if options.compile_seconds:
            self.compile()
        trained_from = time.monotonic()
        deadline = began + 60 * options.minutes - options.reserve
        good = self.state(self.start)
        next_check, rate_scale = trained_from + 60, 1.0
        last: tuple[torch.Tensor, ...] | None = None
        mark, mark_tokens, mark_steps = trained_from, self.tokens, self.steps
        while (clock := time.monotonic()) < deadline and (not options.steps or self.steps < options.steps):
            share = (clock - trained_from) / max(1e-9, deadline - trained_from)
            if options.steps:
                share = self.steps / options.steps
            progress = self.start + (options.until - self.start) * share
            now = plan(progress, options.short, options.long)
            now.rate *= rate_scale
            last = self.step(now)
            if self.steps - mark_steps >= options.log_every:
                main, draft, balance, norm = (v.item() for v in last)
                clock = time.monotonic()
                self.note(
                    step=self.steps,
                    progress=round(progress, 4),
                    seconds=round(clock - began, 1),
                    tokens=self.tokens,
                    rate=round((self.tokens - mark_tokens) / (clock - mark)),
                    length=now.length,
                    rounded=now.rounded,
                    loss=round(main, 4),
                    draft=round(draft, 4),
                    balance=round(balance, 4),
                    norm=round(norm, 3),
                )
                mark, mark_tokens, mark_steps = clock, self.tokens, self.steps
                if not all(v == v and abs(v) < 1e4 for v in (main, draft, norm)):
                    self.note(event="diverged: back to the last good weights at half the rate")
                    self.restore(good | {"progress": self.start, "log": self.log})
                    rate_scale /= 2
            if clock > next_check:
                next_check = clock + 60
                self.check(f"{progress:.3f}")
                if last is not None and last[0].isfinite():
                    good = self.state(self.start)
                mark, mark_tokens, mark_steps = time.monotonic(), self.tokens, self.steps
        self.check("end", rounded=True)
        if options.state:
            torch.save(self.state(options.until), options.state)
        self.note(
            steps=self.steps, tokens=self.tokens, seconds=round(time.monotonic() - began, 1), device=device_name()
        )
        (options.out / "training.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in self.log), encoding="utf-8"
        )

    def check(self, label: str, rounded: bool = False) -> None:
        """Validate, and save what there is: a run that is cut off has left its last minute's weights."""
        options = self.options
        batch = max(1, options.tokens_per_step // options.long)
        count = max(1, options.valid_tokens // options.long // batch) * batch
        with self.autocast():
            self.note(valid=label, **validate(self.forward, self.valid, count, options.long, batch))
            if rounded:
                with on_grid(self.parameters, True):
                    self.note(valid="4-bit", **validate(self.forward, self.valid, count, options.long, batch))
        save(self.parameters, self.config, options.out)


def device_name() -> str:
    """The accelerator's name, or ``cpu``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in this thread after `seconds`."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    previous: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def parser() -> argparse.ArgumentParser:
    """The command line; the defaults are those the embedded checkpoint was made with."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, default=Path(".tiny"), help="folder made by engine.tiny.corpus")
    made.add_argument("--out", type=Path, required=True, help="folder for the trained weights")
    made.add_argument("--minutes", type=float, default=8.6, help="wall-clock budget of this command")
    made.add_argument("--reserve", type=float, default=25.0, help="seconds of it kept for the last check and saving")
    made.add_argument("--until", type=float, default=1.0, help="share of the whole schedule reached at the end")
    made.add_argument("--state", type=Path, help="file for the full state, for --resume")
    made.add_argument("--resume", type=Path, help="full state of an earlier command to go on from")
    made.add_argument("--tokens-per-step", type=int, default=65_536)
    made.add_argument("--valid-tokens", type=int, default=262_144, help="tokens of each kind in a validation")
    made.add_argument("--short", type=int, default=1024, help="window length of the first 65 percent")
    made.add_argument("--long", type=int, default=4096, help="window length of the rest")
    made.add_argument("--muon-rate", type=float, default=4e-3)
    made.add_argument("--adam-rate", type=float, default=3e-3)
    made.add_argument("--compile-seconds", type=float, default=120.0, help="limit for torch.compile; 0 to stay eager")
    made.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    made.add_argument("--steps", type=int, default=0, help="fixed number of steps instead of the clock (smoke runs)")
    return made


def main() -> None:
    """Command line entry."""
    began = time.monotonic()
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Trainer(options).run(began)


if __name__ == "__main__":
    main()
