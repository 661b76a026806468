"""A compilation of every Triton kernel to a GPU's machine code, which needs no GPU.

train_kernels.py runs this in a separate process, because its own kernels are interpreted.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from petps.train.kernels import intersect, rank, unique

HOPPER = GPUTarget("cuda", 90, 32)
CONSTANTS = {"steps": 20, "partitions": 64, "radix": 1 << unique.DIGIT_BITS}
NUMBERS = ("n", "m", "blocks", "shift", "dummy")


def type_of(argument: str) -> str:
    if argument in NUMBERS:
        return "i32"
    return "*i32" if argument == "flags" else "*i64"


def main() -> None:
    for module in (intersect, rank, unique):
        for name, kernel in vars(module).items():
            if not isinstance(kernel, triton.JITFunction) or kernel.__module__ != module.__name__:
                continue
            if name == "_hash":  # compiled with the kernels that call it
                continue
            fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
            small = "radix" in fixed
            constants = CONSTANTS | {"size": unique.SORT_BLOCK if small else rank.BLOCK}
            signature = {
                argument: "constexpr" if argument in fixed else type_of(argument)
                for argument in kernel.arg_names
            }
            source = ASTSource(
                kernel, signature=signature, constexprs={name: constants[name] for name in fixed}
            )
            built = triton.compile(source, target=HOPPER)
            print(f"{name}: {len(built.asm['cubin'])} bytes", flush=True)


if __name__ == "__main__":
    main()
