"""Errors of connections between ranks."""

import re

import pytest
import torch

from toolkit.distributed import group
from toolkit.distributed.group import nccl_problem

ERROR = (
    "NCCL error in: ProcessGroupNCCL.cpp:94, {kind}: what it means, NCCL version 2.28.9\n{kind}: "
)


@pytest.mark.parametrize(
    ("kind", "last", "problem"),
    [
        (
            "ncclInternalError",
            "Last error:\nBootstrap : no socket interface found",
            "Bootstrap : no socket interface found",
        ),
        ("ncclInvalidUsage", "Last error:\nDuplicate GPU\n detected", "Duplicate GPU detected"),
        ("ncclUnhandledCudaError", "", "ncclUnhandledCudaError"),
        (
            "ncclUnhandledCudaError",
            "Last error:\nCuda failure 217 'peer access is not supported'",
            "Cuda failure 217 'peer access is not supported'",
        ),
        ("ncclRemoteError", "Last error:\nsocket closed", None),
        ("ncclSystemError", "Last error:\nconnect returned Connection refused", None),
        ("ncclSystemError", "Last error:\nclosed by remote peer", None),
    ],
)
def test_problems_of_this_machine_are_told_from_lost_ranks(kind, last, problem):
    assert nccl_problem(ERROR.format(kind=kind) + last) == problem


def test_other_errors_are_not_nccl_s():
    assert nccl_problem("The client socket has timed out") is None


def test_a_failed_start_does_not_change_the_name_of_the_next(tmp_path, monkeypatch):
    """Ranks of other processes, which have not failed, look for each other by that name."""
    monkeypatch.setattr(group, "TIMEOUT_SECONDS", 0.3)
    names = []
    for attempt in range(2):
        (folder := tmp_path / str(attempt)).mkdir()
        with pytest.raises(RuntimeError, match="timeout"):
            group.connect(0, 2, folder, torch.device("cpu"))
        names.append(re.findall(rb"/(\d+)//cpu", (folder / "ranks").read_bytes()))
    assert names[0] == names[1] == [b"0"]
