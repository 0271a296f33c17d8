"""Every case ID has a test, and every test of a case has an ID."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_every_case_has_a_test() -> None:
    ids = FOLDER.joinpath("ids.txt").read_text().split()
    source = "".join(path.read_text() for path in sorted(FOLDER.glob("test_*.py")))
    names = re.findall(r"def test_(js_\d{3}|pub_\d{2})_", source)
    tested = {name.upper().replace("_", "-") for name in names}
    assert len(ids) == len(set(ids))
    assert sorted(set(ids) - tested) == []
    assert sorted(tested - set(ids)) == []
