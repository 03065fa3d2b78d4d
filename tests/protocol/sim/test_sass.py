# SPDX-License-Identifier: Apache-2.0
"""The reader of machine code, on texts of a few lines."""

import pytest

from tests.protocol.sim.sass import (
    blocks_per_sm,
    copies_of,
    kernel_name,
    late_waits,
    loads_ahead,
    registers_of,
)

NAME = "_ZN8fastcoll4moveINS_8ProtocolEEEvNS_10DeviceCallE"

# Two packs under way, as nvcc writes them for sm_90.
TWO = """
        /*0100*/              @P1 LDG.E.128 R8, desc[UR6][R24.64] ;    /* 0x0 */
                                                                       /* 0x1 */
        /*0110*/                  IADD3 R26, P4, R105, R26, RZ ;       /* 0x0 */
        /*0120*/              @P2 LDG.E.128 R12, desc[UR6][R64.64] ;   /* 0x0 */
        /*0130*/              @P1 STG.E.128 desc[UR6][R26.64], R8 ;    /* 0x0 */
        /*0140*/              @P2 STG.E.128 desc[UR6][R70.64], R12 ;   /* 0x0 */
"""
ADDING = "        /*0128*/                  FADD R3, R2, R9 ;\n"
CHASING = "        /*0128*/                  LDG.E.128 R16, desc[UR6][R12.64] ;\n"
JUMP = "        /*0118*/                  BRA 0x40 ;\n"
JUMP_MAYBE = "        /*0118*/              @P3 BRA 0x40 ;\n"
FENCE = "        /*0118*/                  MEMBAR.ALL.SYS ;\n"
STORED = "        /*0118*/                  STG.E.128 desc[UR6][R26.64], R8 ;\n"
FLAG = "        /*0118*/                  LDG.E.128.STRONG.SYS R36, desc[UR6][R24.64] ;\n"

SECOND = "        /*0120*/"
STORE = "        /*0130*/"


def function(body: str) -> str:
    return f"\t\tFunction : {NAME}\n{body}"


@pytest.mark.parametrize(
    ("body", "copies"),
    [
        (TWO, [2]),
        (TWO + TWO, [2, 2]),
        (FENCE, []),
        (TWO.replace(STORE, ADDING + STORE), []),  # what was loaded is not stored as it is
        (TWO.replace(STORE, CHASING + STORE), []),  # an address that was loaded
        (TWO.replace(SECOND, STORED + SECOND), [1, 1]),
        (TWO.replace(SECOND, JUMP + SECOND), [1]),
        (TWO.replace(SECOND, JUMP_MAYBE + SECOND), [2]),
        (TWO.replace(SECOND, FENCE + SECOND), [1]),
        (TWO.replace(SECOND, FLAG + SECOND), [2]),  # a word of the protocol is no data
    ],
)
def test_loads_before_a_store_are_counted(body: str, copies: list[int]) -> None:
    assert copies_of(function(body)) == {"move": copies}


def test_each_kernel_is_counted_by_itself() -> None:
    other = function(TWO).replace("4move", "7barrier")
    assert copies_of(function(TWO + TWO) + other) == {"move": [2, 2], "barrier": [2]}


DATA = "        /*0100*/              @P1 LDG.E.64 R8, desc[UR6][R24.64] ;\n"
WORD = "        /*0110*/                  LDG.E.64.STRONG.SYS R6, desc[UR6][R6.64+0x18000] ;\n"
TURN = "        /*0120*/              ATOMG.E.EXCH.64.STRONG.GPU PT, R14, desc[UR6][R10.64], R4 ;\n"


@pytest.mark.parametrize(
    ("body", "ahead"),
    [(DATA + DATA + WORD + TURN, 2), (TURN + DATA, 0), (DATA + TURN + DATA + TURN, 1)],
)
def test_loads_before_the_turn_are_counted(body: str, ahead: int) -> None:
    assert loads_ahead(function(body)) == {"move": ahead}
    assert loads_ahead(function(DATA)) == {}


WAIT = "        /*0090*/                  ACQBULK ;\n"
ARGUMENT = "        /*0080*/                  LDC R1, c[0x0][0x28] ;\n"


@pytest.mark.parametrize(
    ("body", "late"),
    [
        (ARGUMENT + WAIT + DATA, []),
        (DATA + WAIT, ["move"]),
        (WORD + DATA, ["move"]),
        (TURN + WAIT + DATA, ["move"]),
    ],
)
def test_a_touch_before_the_wait_is_seen(body: str, late: list[str]) -> None:
    assert late_waits(function(body)) == late


def test_registers_are_those_of_kernels() -> None:
    ptxas = (
        f"ptxas info    : Compiling entry function '{NAME}' for 'sm_90'\n"
        f"ptxas info    : Function properties for {NAME}\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 114 registers, used 1 barriers\n"
    )
    assert registers_of(ptxas) == {"move": 114}
    assert kernel_name("planted") == "planted"


@pytest.mark.parametrize(("registers", "blocks"), [(64, 2), (65, 1), (32, 4), (128, 1), (129, 0)])
def test_registers_bound_the_blocks(registers: int, blocks: int) -> None:
    assert blocks_per_sm(registers) == blocks
