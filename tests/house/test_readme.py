# SPDX-License-Identifier: Apache-2.0
"""What the README shows works as it stands there."""

import re
from pathlib import Path

from tests.support.programs import run_as_told

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_run(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in program.splitlines() if not line.startswith("#")]) == 10
    done = run_as_told(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "".join(done.stdout.split()) == "3.03.0"  # the ranks' lines may mix


def test_the_two_commands_exist() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.S)
    assert commands == ["scripts/demo.sh", "scripts/test.sh"]
    for command in commands:
        assert (ROOT / command).stat().st_mode & 0o111


def test_links_lead_somewhere() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (ROOT / target).exists(), f"{document} -> {target}"
