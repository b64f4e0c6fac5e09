"""Fails where too few tests ran: `executed.py JUNIT.xml --least N`. A skipped test has shown nothing."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """0 if at least N test cases of the file ran, else 1 with the reasons of those that did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--least", type=int, required=True)
    given = parser.parse_args(argv)
    cases = list(ET.parse(given.file).iter("testcase"))
    skipped = Counter(s.get("message", "no reason") for case in cases for s in case.findall("skipped"))
    ran = len(cases) - sum(skipped.values())
    print(f"{ran} tests ran, {sum(skipped.values())} were skipped")
    for reason, count in skipped.most_common():
        print(f"  {count}: {reason}")
    if ran < given.least:
        print(f"::error title=tests::only {ran} tests ran, at least {given.least} must")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
