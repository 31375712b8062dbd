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
    T5Config,
    T5ForConditionalGeneration,
)

from paceline.torch import Pipeline
from pipeline_cases import differences_with
from torch_support import TWO

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
    if name == "T5":
        sizes: dict[str, Any] = {"vocab_size": 30, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 3, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
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
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "T5"])
def test_a_transformer_trains_bit_for_bit(name: str, attention: str, checkpointing: bool) -> None:
    model = model_of(name, attention)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert differences_with(model, loss_inside, batch_of(name)) == []


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "T5"])
def test_a_transformer_without_memory_is_measured_and_filled(name: str, checkpointing: bool) -> None:
    full = model_of(name, "sdpa")
    with torch.device("meta"):
        empty = model_of(name, "sdpa")
    parts = dict(full.named_modules())

    def init(path: str, part: Any) -> None:
        for own, theirs in ((part.parameters(), parts[path].parameters()), (part.buffers(), parts[path].buffers())):
            for one, other in zip(own, theirs, strict=True):
                if not one.is_meta:
                    one.copy_(other)

    found = []
    pairs: list[tuple[Any, dict[str, Any]]] = [(full, {}), (empty, {"init": init})]
    for model, options in pairs:
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with Pipeline(model, TWO, micro_batches=3, cuts=[0, 2], **options) as trainer:
            trainer.step(loss_inside, batch_of(name))
            assert len(trainer.report()["pipeline"]["stages"]) == 2
            assert len(trainer.report()["pipeline"]["blocks"]) == (0 if model is full else 6 if name == "T5" else 4)
        found.append([one.grad for one in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
