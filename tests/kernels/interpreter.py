"""Triton's interpreter: whether kernels run in it, and two repairs of that of Triton 3.6, without
which half of a kernel cannot."""

from __future__ import annotations

from typing import Any


def check() -> None:
    """Raise RuntimeError unless kernels are interpreted: those that triton made when it was
    imported, and those that are made from here on."""
    import triton.language.standard as made
    from triton import knobs
    from triton.runtime.jit import JITFunction

    if any(type(value) is JITFunction for value in vars(made).values()):
        raise RuntimeError("triton was imported before tests/conftest.py set TRITON_INTERPRET")
    if not knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is gone: something that ran before has taken it away")


def repair() -> None:
    """Run-time loop bounds under NumPy 2.4, which refuses the int of an array of one element;
    products of bfloat16, whose bits it would multiply as integers."""
    from triton.runtime import interpreter as own

    patch, dot = own._patch_lang_tensor, own.InterpreterBuilder.create_dot

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != own.tl.bfloat16:
            return operand
        data = own._convert_float(operand.data, own.tl.bfloat16, own.tl.float32, None)
        return own.TensorHandle(data.view(own.np.float32), own.tl.float32)

    def dot_of_widened(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    own._patch_lang_tensor = patch_with_index
    own.InterpreterBuilder.create_dot = dot_of_widened
