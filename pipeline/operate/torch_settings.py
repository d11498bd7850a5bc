"""torch's settings for repeatable arithmetic. Its constant is read without torch."""

import os

FIXED_ORDER_ALGORITHM = "Ring"
"""NCCL's algorithm in deterministic mode: it sums in the same order in each start.

On GPUs with an NVSwitch NCCL may choose NVLS, whose sums can differ from call to call
(NVIDIA/nccl#1497). torch's deterministic mode (2.14) excludes NVLS, but not NVLSTree.
"""


def configure_torch(*, deterministic: bool, any_order: bool = False, precision: str, threads: int) -> None:
    """Set this process's threads, TF32 and, in deterministic mode, deterministic kernels and sums.

    Call it before the process group forms. any_order: that of NCCL's sums does not matter.
    """
    import torch

    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if deterministic:
        # cuBLAS reads this when its first handle is created, so it must be set before any GPU work.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if not any_order:
            os.environ["NCCL_ALGO"] = FIXED_ORDER_ALGORITHM
        torch.use_deterministic_algorithms(True)
        # This setting only helps to find bugs, and would slow down every step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
