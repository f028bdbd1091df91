"""Set the switches of torch that change eager numbers for a run, and set them back after it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from layerparity.ground.errors import UserError

# Variables by which libraries under torch compute float32 in fewer digits, whatever torch is told:
# what they act on, and the value that leaves float32 as it is.
_FEWER_DIGITS = {
    "NVIDIA_TF32_OVERRIDE": (True, "0"),
    "ONEDNN_DEFAULT_FPMATH_MODE": (False, "STRICT"),
    "DNNL_DEFAULT_FPMATH_MODE": (False, "STRICT"),
}


@dataclass(frozen=True)
class Switches:
    """What was set before a run: torch's matmul precision, cuDNN's TF32, the threads."""

    matmul_precision: str
    cudnn_tf32: bool
    threads: int


def set_exact(threads: int | None) -> Switches:
    """Forbid TF32 (float32 must be float32 in a golden), set the threads; return what was set."""
    before = Switches(
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.get_num_threads(),
    )
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if threads is not None:
        torch.set_num_threads(threads)
    return before


def refuse_fewer_digits(on_cuda: bool) -> None:
    """Raise UserError where a variable has float32 computed in fewer digits than it has."""
    for name, value in _fewer_digits(on_cuda).items():
        raise UserError(
            f"{name}={value} has float32 computed in fewer digits: by a golden run made so nothing "
            "can be judged",
            f"run it without: env -u {name} ...",
        )


def _fewer_digits(on_cuda: bool) -> dict[str, str]:
    """Return the variables that say so, and their values."""
    return {
        name: value
        for name, (for_cuda, harmless) in _FEWER_DIGITS.items()
        if for_cuda == on_cuda and (value := os.environ.get(name, "")) and value.upper() != harmless
    }


def restore(switches: Switches) -> None:
    """Set the switches back."""
    torch.set_float32_matmul_precision(switches.matmul_precision)
    torch.backends.cudnn.allow_tf32 = switches.cudnn_tf32
    torch.set_num_threads(switches.threads)


def described(on_cuda: bool) -> dict[str, str]:
    """Return the switches for a run's fingerprint; those of CUDA only where it computes."""
    switches: dict[str, object] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if on_cuda:
        matmul = torch.backends.cuda.matmul
        cudnn = torch.backends.cudnn
        switches |= {
            "cuda_matmul_tf32": matmul.allow_tf32,
            "cuda_matmul_bf16_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "cuda_matmul_fp16_reduction": matmul.allow_fp16_reduced_precision_reduction,
            "cudnn_tf32": cudnn.allow_tf32,
            "cudnn_benchmark": cudnn.benchmark,
            "cudnn_deterministic": cudnn.deterministic,
        }
    return {name: str(value) for name, value in {**switches, **_fewer_digits(on_cuda)}.items()}
