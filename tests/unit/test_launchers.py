# SPDX-License-Identifier: Apache-2.0
"""The variables of launchers: whose are believed, where ranks meet, what is missing."""

import os
import re

import pytest

from fastcoll.errors import UsageError
from fastcoll.launchers import Launch, explain_no_launch, find_launch, first_host

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_torchruns_variables_come_first() -> None:
    assert find_launch({**OPEN_MPI, **SRUN, **TORCHRUN}) == Launch(1, 4, "here", 29500)


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_ranks_of_mpirun_on_one_machine_meet_at_a_port_of_their_job(environ: dict) -> None:
    found = find_launch({**SRUN, **environ})  # inside of an allocation
    assert found is not None
    assert (found.rank, found.world_size, found.master_addr) == (2, 3, "127.0.0.1")
    assert 20000 <= found.master_port < 32768
    assert re.fullmatch(rf"{os.getppid()}-\d+", found.job)
    assert find_launch(environ) == found


def test_a_port_that_is_told_is_taken() -> None:
    told = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert find_launch({**OPEN_MPI, **told}) == Launch(2, 3, "head", 29500)
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", **told}
    assert find_launch(several) == Launch(2, 3, "head", 29500)


def test_mpirun_on_several_machines_has_to_say_where() -> None:
    with pytest.raises(UsageError, match=r"rank 2 of 3, .*mpirun on several.*MASTER_ADDR"):
        find_launch({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_tasks_of_srun_meet_on_the_first_node() -> None:
    found = find_launch(SRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.master_addr) == (2, 3, "gpu03")
    assert found.job == "slurm-77.0"
    here = find_launch({**SRUN, "SLURM_STEP_NUM_NODES": "1"})
    assert here is not None
    assert here.master_addr == "127.0.0.1"
    another_step = find_launch({**SRUN, "SLURM_STEP_ID": "1"})
    assert another_step is not None
    assert another_step.master_port != found.master_port


def test_a_batch_script_is_no_task() -> None:
    # sbatch sets these in the script itself, of which there is one.
    assert find_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-07,9],login", "gpu03"),
        ("a,b[1-2]", "a"),
        ("rack[2,4]n[01-16]x,b", "rack2n01x"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, ""),
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "RANK and WORLD_SIZE and MASTER_PORT are set, but MASTER_ADDR is not",
        ),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set, but nothing tells how many ranks"),
    ],
)
def test_the_missing_variables_are_named(environ: dict[str, str], text: str) -> None:
    assert find_launch(environ) is None
    assert explain_no_launch(environ).startswith(text)
    assert bool(explain_no_launch(environ)) == bool(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"PMI_RANK": "x"}, "PMI_RANK='x' must be a whole number"),
        ({"PMI_RANK": "3"}, "PMI_RANK=3 is outside the number of ranks=3"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is outside"),
    ],
)
def test_variables_without_sense_are_named(change: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        find_launch({**MPICH, **change})
