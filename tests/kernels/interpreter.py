"""Two repairs of Triton 3.6's interpreter, without which half of a kernel cannot run in it."""

from __future__ import annotations

from typing import Any


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
