"""Linear layers for bfloat16 on a CPU, with weights packed once.

torch's own linear reorders a bfloat16 weight for oneDNN at every call, which
costs as much as the product when there are few rows. Here the reordering is
done once, at load, and projections of one input (q, k, v; gate, up) are one
product. The results are bit-equal to torch's linear; other dtypes and devices
keep their layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

# Projections that transformers' attention and MLP modules apply to one input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# oneDNN packs for a number of rows it may expect; decoding has few.
_EXPECTED_ROWS = 16


class _Product:
    """One packed product, whose output's columns belong to one or more layers."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears]
        self._bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The part of layer `index`; the product is computed with the first one asked for."""
        if self._input is not x:
            product = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            self._outputs = product.split(self._sizes, dim=-1)
            self._input = x
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()  # keeps nothing alive
        return output


class _PackedLinear(nn.Module):
    """Stands where an nn.Linear stood."""

    def __init__(self, product: _Product, index: int) -> None:
        super().__init__()
        self._product = product
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.output(self._index, x)


def pack_linears(model: PreTrainedModel) -> None:
    """Packs a model's linear layers, if it is in bfloat16 on a CPU.

    Args:
        model: Changed in place; its linear weights are freed.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return
    if not torch.backends.mkldnn.is_available():
        return
    for module in list(model.modules()):
        children = {
            name: child for name, child in module.named_children() if type(child) is nn.Linear
        }
        groups: list[tuple[str, ...]] = [
            names for names in _SIBLINGS if all(name in children for name in names)
        ]
        grouped = {name for names in groups for name in names}
        groups += [(name,) for name in children if name not in grouped]
        for names in groups:
            linears = [children[name] for name in names]
            if len({linear.bias is None for linear in linears}) > 1:
                for name in names:
                    setattr(module, name, _PackedLinear(_Product([children[name]]), 0))
                continue
            product = _Product(linears)
            for index, name in enumerate(names):
                setattr(module, name, _PackedLinear(product, index))
