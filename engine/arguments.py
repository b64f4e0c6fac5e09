"""Command lines that are refused in one line. Imports nothing of the engine: the doctor runs where MLX does not."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Arguments(argparse.ArgumentParser):
    """A parser that says in one line what cannot be used, without the whole usage; exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and where to look, and end."""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help shows what it takes\n")
