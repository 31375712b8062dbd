"""Classes of Hugging Face, as they are, in a pipeline: bit for bit as plain accumulation of the same micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from pipeline_cases import differences_with

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL: dict[str, Any] = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4}


def model_of(name: str, attention: str) -> Any:
    torch.manual_seed(0)
    if name == "GPT-2":
        gpt = GPT2Config(vocab_size=30, n_positions=16, n_embd=8, n_layer=4, n_head=2, **NO_DROPOUT)
        gpt._attn_implementation = attention
        return GPT2LMHeadModel(gpt)
    if name == "Llama":
        llama = LlamaConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16)
        llama._attn_implementation = attention
        return LlamaForCausalLM(llama)
    bert = BertConfig(
        **SMALL,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    bert._attn_implementation = attention
    return BertForSequenceClassification(bert)


def batch_of(name: str, items: int = 6) -> tuple[torch.Tensor, ...]:
    """Token ids, attention mask and labels of padded sentences."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (items,), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).long()
    ids = torch.randint(1, 30, (items, 8), generator=generator) * mask
    return ids, mask, ids[:, 0] % 3 if name == "BERT" else ids.masked_fill(mask == 0, -100)


def loss_inside(model: Any, batch: Any) -> Any:
    ids, mask, labels = batch
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT"])
def test_a_transformer_trains_bit_for_bit(name: str, attention: str, checkpointing: bool) -> None:
    model = model_of(name, attention)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert differences_with(model, loss_inside, batch_of(name)) == []
