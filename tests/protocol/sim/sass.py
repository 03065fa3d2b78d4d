# SPDX-License-Identifier: Apache-2.0
"""Facts about a kernel by its machine code: loads under way at once, registers, occupancy.

Reads the text of `cuobjdump -sass` and of `ptxas -v`. A copy loop shows as loads of 16 bytes whose
registers a store of 16 bytes then reads.
"""

import re
from collections.abc import Iterator

BLOCK_THREADS = 512  # kMaxBlockThreads
_FILE_REGISTERS = 65536  # of a multiprocessor, from sm_80 on
_REGISTER_GRAIN = 8  # a thread gets a multiple of so many

_FUNCTION = re.compile(r"Function : (\S+)")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+?)(?: (.*?))?\s*;")
_PTXAS = re.compile(r"Compiling entry function '(\w+)'[\s\S]*?Used (\d+) registers")
_TOUCHES = ("LDG", "STG", "LD.", "ST.", "LDS", "STS", "ATOM", "RED", "LDGMC", "MEMBAR")
_ENDS = ("EXIT", "RET", "BRA", "BAR", "MEMBAR")


def kernel_name(mangled: str) -> str:
    """Return `move` of `_ZN8fastcoll4moveINS_...`."""
    found = re.match(r"_ZN8fastcoll(\d+)(\w+)", mangled)
    return found[2][: int(found[1])] if found else mangled


def registers_of(ptxas: str) -> dict[str, int]:
    """Return the registers of a thread, by kernel."""
    return {kernel_name(name): int(count) for name, count in _PTXAS.findall(ptxas)}


def blocks_per_sm(registers: int) -> int:
    """Return how many of the largest blocks the registers of a multiprocessor hold."""
    each = -(-registers // _REGISTER_GRAIN) * _REGISTER_GRAIN
    return _FILE_REGISTERS // (each * BLOCK_THREADS)


def copies_of(sass: str) -> dict[str, list[int]]:
    """Return by kernel, for each of its copies in turn, how many loads come before the store.

    All of them are independent: no instruction between them reads what one of them loads. A branch
    that is always taken, a barrier or a fence ends a run of loads.
    """
    copies: dict[str, list[int]] = {}
    name, loads = "", 0
    loaded: set[int] = set()
    for function, op, operands, is_always in _instructions(sass):
        if function != name:
            name, loads, loaded = function, 0, set()
            copies[kernel_name(name)] = []  # two types of one kernel are never in one text
        parts = operands.split(", ") if operands else []
        is_store = op.startswith(("ST", "ATOM", "RED"))
        read = _registers(" ".join(parts if is_store else parts[1:]))
        if loaded & read:
            if op.startswith(("STG.E.128", "ST.E.128")) and "STRONG" not in op:
                copies[kernel_name(name)].append(loads)
            loads, loaded = 0, set()
        if op.startswith(_ENDS) and (is_always or not op.startswith("BRA")):
            loads, loaded = 0, set()
        if op.startswith(("LDG.E.128", "LD.E.128")) and "STRONG" not in op:
            first = int(parts[0].removeprefix("R").split(".")[0])
            loads, loaded = loads + 1, loaded | set(range(first, first + 4))
    return copies


def late_waits(sass: str) -> list[str]:
    """Return the kernels that touch memory before they wait for their stream's earlier work.

    Or that never wait for it. Arguments lie in constant memory, which is there from the start.
    """
    waits: set[str] = set()
    late: dict[str, None] = {}
    for function, op, _, _ in _instructions(sass):
        if op.startswith("ACQBULK"):
            waits.add(function)
        elif op.startswith(_TOUCHES) and function not in waits:
            late[kernel_name(function)] = None
    return list(late)


def loads_ahead(sass: str) -> dict[str, int]:
    """Return by kernel how many loads of 8 bytes of data come before it takes its turn.

    Words of the protocol are no data. A kernel that takes no turn has none.
    """
    counts: dict[str, int] = {}
    ahead: dict[str, int] = {}
    for function, op, _, _ in _instructions(sass):
        name = kernel_name(function)
        if op.startswith("ATOMG") and "EXCH" in op:
            ahead.setdefault(name, counts.get(name, 0))
        if op.startswith("LDG.E.64") and "STRONG" not in op:
            counts[name] = counts.get(name, 0) + 1
    return ahead


def _instructions(sass: str) -> Iterator[tuple[str, str, str, bool]]:
    """Yield each instruction's function, operation, operands, and whether it has no predicate."""
    function = ""
    for line in sass.splitlines():
        if found := _FUNCTION.search(line):
            function = found[1]
        elif function and (found := _INSTRUCTION.match(line)):
            yield function, found[1], found[2] or "", "@" not in line


def _registers(operands: str) -> set[int]:
    """Return the registers that operands name; those with `.64` are the first of a pair."""
    named = set()
    for number, pair in re.findall(r"\bR(\d+)(\.64)?", operands):
        named |= {int(number), int(number) + bool(pair)}
    return named
