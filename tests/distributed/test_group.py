"""Errors of connections between ranks."""

import pytest

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
