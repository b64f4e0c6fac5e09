"""The loader of kernel texts: what it reads, what it refuses, and how a kernel is told apart from its older self."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from engine.kernels import attention, loader
from engine.kernels.loader import KernelError, Launch

TEXT = """// What it is.

// kernel: double_it
// inputs: x bias
// dense: bias
// outputs: y
// template: typename T, int N, bool B
y[thread_position_in_grid.x] = x[x_strides[0]];

// kernel: other
// inputs: x
// dense: x
// outputs: y z
// template: typename T
y[0] = x[0];
"""


def test_a_text_is_read_kernel_by_kernel():
    kernels = loader.parse("topic", TEXT, "header")
    assert list(kernels) == ["double_it", "other"]
    first = kernels["double_it"]
    assert (first.name, first.inputs, first.outputs) == ("topic_double_it", ("x", "bias"), ("y",))
    assert first.template == (("T", "typename"), ("N", "int"), ("B", "bool"))
    assert first.body.startswith('\n#line 8 "topic.metal"\ny[thread')
    assert "other" not in first.body and kernels["other"].outputs == ("y", "z")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("// kernel: ", "// ", "no line"),
        ("// outputs: y\n", "", r"lacks the lines \['outputs'"),
        ("x[x_strides[0]]", "x[0]", "neither reads x_strides nor lists it as dense"),
    ],
)
def test_a_text_that_breaks_a_rule_is_refused(old, new, message):
    with pytest.raises(KernelError, match=message):
        loader.parse("topic", TEXT.replace(old, new), "header")


def test_the_name_of_a_launch_changes_with_everything_it_is_compiled_from():
    """MLX keeps compiled kernels by name: under the old name it would run the old text."""
    kernel = loader.parse("topic", TEXT, "header")["double_it"]
    changed = [
        replace(kernel, body=kernel.body + " "),
        replace(kernel, header="other"),
        replace(kernel, inputs=("bias", "x")),
        replace(kernel, template=kernel.template[:2]),
    ]
    names = {kernel.launch_name, *(k.launch_name for k in changed)}
    assert len(names) == 5 and all(name.startswith("topic_double_it_") for name in names)


def test_the_identity_of_a_variant_changes_with_its_wrapper(tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text("a = 1\n", encoding="utf-8")
    before = loader.identity(attention.TOPIC, str(wrapper))
    assert before == loader.identity(attention.TOPIC, str(wrapper))
    wrapper.write_text("a = 2\n", encoding="utf-8")
    assert loader.identity(attention.TOPIC, str(wrapper)) != before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"T": mx.float32, "N": 1}, "takes template arguments"),
        ({"T": mx.float32, "N": True, "B": True}, "N is a int"),
        ({"T": "float", "N": 1, "B": True}, "T is a typename"),
    ],
)
def test_template_arguments_of_the_wrong_kind_are_refused(given, message):
    with pytest.raises(KernelError, match=message):
        loader.parse("topic", TEXT, "")["double_it"].arguments(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inputs": (mx.zeros((1,)),)}, "takes inputs"),
        ({"grid": (65, 1, 1)}, "does not divide"),
        ({"threadgroup": (16, 1, 1)}, "does not divide"),
        ({"inputs": (mx.zeros((1,)), mx.array(1.0))}, "bias is 0-d"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(changed, message):
    kernel = loader.parse("topic", TEXT, "")["double_it"]
    good = Launch(kernel, (mx.zeros((1,)), mx.zeros((1,))), [], (64, 1, 1), (32, 1, 1), [(1,)], [mx.float32])
    with pytest.raises(KernelError, match=message):
        replace(good, **changed)


def test_on_cuda_a_kernel_is_given_by_reference(tmp_path):
    for topic in loader.topics():
        for kernel in loader.load(topic).values():
            header, body = loader.by_reference(kernel, tmp_path / "kernels")
            files = [Path(text.split('"')[1]) for text in (header, body)]
            assert [file.read_text(encoding="utf-8") for file in files] == [kernel.header, kernel.body]
            assert len(header + body) < 1200
            for name in kernel.inputs:
                for what in ("shape", "strides", "ndim"):
                    assert (f"{name}_{what}" in body) == (f"{name}_{what}" in kernel.body)


def test_a_text_that_was_damaged_in_the_cache_is_written_again(tmp_path):
    kernel = loader.load(attention.TOPIC)["merge"]
    body = Path(loader.by_reference(kernel, tmp_path)[1].split('"')[1])
    body.write_text("half of", encoding="utf-8")
    loader.by_reference(kernel, tmp_path)
    assert body.read_text(encoding="utf-8") == kernel.body
    assert not list(tmp_path.glob("*.[0-9]*")), "no half-written file stays behind"


def test_without_a_cache_folder_a_kernel_is_given_whole(tmp_path):
    kernel = loader.load(attention.TOPIC)["merge"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert loader.by_reference(kernel, tmp_path / "file" / "kernels") == (kernel.header, kernel.body)


def test_a_topic_without_a_text_is_named_with_those_there_are():
    with pytest.raises(KernelError, match="no kernel text absent.metal; there are .*attention_decode"):
        loader.load("absent")


def test_every_kernel_has_its_metal_text():
    assert attention.TOPIC in loader.topics()
    for topic in loader.topics():
        assert loader.load(topic)
    assert not list(loader.FOLDER.glob("*.cu"))


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="a GPU is here")
def test_a_launch_on_a_cpu_is_refused():
    kernel = loader.load(attention.TOPIC)["merge"]
    zeros = mx.zeros((1, 1, 2, 256)), mx.zeros((1, 1, 2, 2))
    with pytest.raises(KernelError, match="runs on a GPU"):
        loader.launch(Launch(kernel, zeros, [], (512, 1, 1), (256, 1, 1), [(1, 1, 256)], [mx.float32]))
