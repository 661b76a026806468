"""Check the subjects of commits: ``room: imperative``, at most 72 characters.

Reads one subject per line from standard input. With --file, reads one message from the file that
git passes to its hook commit-msg. Prints each fault; the exit status is 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SUBJECT_MAX = 72
ROOM = re.compile(r"[a-z][a-z0-9_/ .-]*(, [a-z][a-z0-9_/ .-]*)*: (?P<change>\S.*)")
# A first word of this form is no imperative, except those of IMPERATIVES.
NOT_IMPERATIVE = re.compile(r"\w*([^s]s|ed|ing)")
IMPERATIVES = {
    *("bias", "bring", "embed", "exceed", "feed", "focus", "need", "ping", "proceed", "seed"),
    *("shed", "speed", "string"),
}
GENERATED = re.compile(r"Merge |Revert \"|(fixup|squash|amend)! ")


def find_fault(subject: str) -> str:
    """Return what is wrong with a subject, or an empty text."""
    if GENERATED.match(subject):  # git wrote it
        return ""
    if len(subject) > SUBJECT_MAX:
        return f"{len(subject)} characters; at most {SUBJECT_MAX}"
    match = ROOM.fullmatch(subject)
    if match is None:
        return "expected 'room: imperative', such as 'index: count each change'"
    verb = match["change"].split()[0].lower()
    if NOT_IMPERATIVE.fullmatch(verb) and verb not in IMPERATIVES:
        return f"'{verb}' is no imperative: write 'add', not 'adds' or 'added'"
    if subject.endswith("."):
        return "ends with a full stop"
    return ""


def main(arguments: list[str]) -> int:
    """Check all subjects; return the exit status."""
    if arguments[:1] == ["--file"]:
        text = Path(arguments[1]).read_text().partition("\n# ------------------------ >8")[0]
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        subjects = lines[:1]
        has_body = any(line.strip() for line in lines[1:])
        if subjects and not has_body and not GENERATED.match(subjects[0]):
            print(f"{subjects[0]}\n  the body is missing: say why", file=sys.stderr)
            return 1
    else:
        subjects = sys.stdin.read().splitlines()
    faults = [(subject, fault) for subject in subjects if (fault := find_fault(subject))]
    for subject, fault in faults:
        print(f"{subject}\n  {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
