"""Hugging Face models from tiny configurations, without downloads; `transformers` is imported on build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linnet.testing.case import Case, case, normal

SIZES: Any = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def make(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A factory of a model from its configuration."""

    def factory() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return factory


def bert(attention: str) -> Callable[[], nn.Module]:
    options: Any = {"vocab_size": 12, "max_position_embeddings": 8, "num_labels": 3, "attn_implementation": attention}
    return make("BertForSequenceClassification", "BertConfig", **SIZES, **options)


def gpt2(attention: str) -> Callable[[], nn.Module]:
    options: Any = {"vocab_size": 12, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    options |= {"eos_token_id": 0, "use_cache": False, "attn_implementation": attention}
    return make("GPT2LMHeadModel", "GPT2Config", **options)


def vit() -> nn.Module:
    options: Any = {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3, "attn_implementation": "sdpa"}
    return make("ViTForImageClassification", "ViTConfig", **SIZES, **options)()


class RootMeanSquare(nn.Module):
    """Llama's normalization in the dtype of its input: the original computes in float32 always."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def llama() -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    options: Any = {"vocab_size": 12, "num_key_value_heads": 1, "max_position_embeddings": 8, "pad_token_id": 0}
    options |= {"use_cache": False, "attn_implementation": "sdpa"}
    model = make("LlamaForCausalLM", "LlamaConfig", **SIZES, **options)()
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            model.set_submodule(name, RootMeanSquare(module.weight, module.variance_epsilon))
    return model


def sentences(n: int, seed: int) -> dict[str, Tensor]:
    """Token indices and an attention mask whose padding is on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 12, (n, 6), generator=generator)
    lengths = torch.randint(3, 7, (n, 1), generator=generator)
    mask = torch.arange(6) < lengths
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def next_token(raw: Any) -> Tensor:
    """The logits after the third token, which every sentence has."""
    return raw.logits[:, 2]


CASES: list[Case] = [
    case("hf_bert", bert("sdpa"), sentences, needs="transformers"),
    case("hf_bert_eager", bert("eager"), sentences, needs="transformers"),
    case("hf_gpt2", gpt2("sdpa"), sentences, next_token, needs="transformers"),
    case("hf_gpt2_eager", gpt2("eager"), sentences, next_token, needs="transformers"),
    case("hf_vit", vit, normal(2, 8, 8), needs="transformers"),
    case("hf_llama", llama, sentences, next_token, needs="transformers"),
]
