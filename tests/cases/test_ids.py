"""Every case ID has a test, and every test of a case has an ID."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_every_case_has_a_test() -> None:
    ids = FOLDER.joinpath("ids.txt").read_text().split()
    source = "".join(path.read_text() for path in sorted(FOLDER.glob("test_*.py")))
    tested = set(re.findall(r"def test_js_(\d{3})_", source))
    assert len(ids) == len(set(ids)) == 185
    assert sorted(set(ids) - {f"JS-{number}" for number in tested}) == []
    assert sorted(tested - {i.removeprefix("JS-") for i in ids}) == []
