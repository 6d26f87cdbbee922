"""`python -m gpuflow` is the command `gpuflow`, for launchers that want a module: `torchrun -m gpuflow train FILE`."""

from __future__ import annotations

from gpuflow.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
