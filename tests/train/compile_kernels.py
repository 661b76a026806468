"""A compilation of every Triton kernel to a GPU's machine code, which needs no GPU.

train_kernels.py runs this in a separate process, because its own kernels are interpreted.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from petps.train.kernels import intersect, pooled, rank, unique

HOPPER = GPUTarget("cuda", 90, 32)
CONSTANTS = {
    "steps": 20,
    "is_mean": True,
    "is_weighted": True,
    "partitions": 64,
    "radix": 1 << unique.DIGIT_BITS,
}
SIZES = {
    intersect: rank.BLOCK,
    pooled: pooled.DIMS_MAX,
    rank: rank.BLOCK,
    unique: rank.BLOCK,
}
NUMBERS = ("n", "m", "dim", "blocks", "shift", "dummy")


def type_of(module: object, argument: str) -> str:
    if argument in NUMBERS:
        return "i32"
    if argument == "flags":
        return "*i32"
    return "*fp32" if module is pooled and argument in ("rows", "weights", "out") else "*i64"


def main() -> None:
    for module, size in SIZES.items():
        for name, kernel in vars(module).items():
            if not isinstance(kernel, triton.JITFunction) or kernel.__module__ != module.__name__:
                continue
            if name == "_hash":  # compiled with the kernels that call it
                continue
            fixed = {each.name for each in kernel.params if each.is_constexpr}
            small = "radix" in fixed
            constants = CONSTANTS | {"size": unique.SORT_BLOCK if small else size}
            signature = {
                each: "constexpr" if each in fixed else type_of(module, each)
                for each in kernel.arg_names
            }
            source = ASTSource(
                kernel, signature=signature, constexprs={each: constants[each] for each in fixed}
            )
            built = triton.compile(source, target=HOPPER)
            print(f"{name}: {len(built.asm['cubin'])} bytes", flush=True)


if __name__ == "__main__":
    main()
