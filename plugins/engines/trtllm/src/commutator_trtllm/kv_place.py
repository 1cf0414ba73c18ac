"""Where this process stands among those of its TensorRT-LLM server, asked of TensorRT-LLM."""

from __future__ import annotations

__all__ = ["gather", "rank", "version"]


def rank() -> int:
    """This process's number among the server's."""
    from tensorrt_llm._utils import mpi_rank  # noqa: PLC0415 - only where TensorRT-LLM is

    return int(mpi_rank())


def gather(word: str) -> list[str]:
    """What each rank says, by rank. Every rank must call it, and waits for all others."""
    from tensorrt_llm._utils import mpi_allgather  # noqa: PLC0415 - only where TensorRT-LLM is

    words: list[str] = mpi_allgather(word)
    return words


def version() -> str:
    import tensorrt_llm  # noqa: PLC0415 - only where TensorRT-LLM is

    return str(tensorrt_llm.__version__)
