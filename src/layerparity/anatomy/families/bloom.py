"""BLOOM: a norm after the token embedding; attention and MLP add to what they are passed beside."""

from layerparity.anatomy.embedding import Embedding, EmbeddingPart, Reads
from layerparity.anatomy.family import Family, taps_under

FAMILY = Family(
    "bloom",
    taps=taps_under({"self_attn": "self_attention"}),
    embedding=Embedding(
        (
            EmbeddingPart("word_embeddings", Reads.TOKENS),
            EmbeddingPart("word_embeddings_layernorm"),
        )
    ),
)
