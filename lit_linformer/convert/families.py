"""How RoBERTa, BERT and DistilBERT name their settings and weights, and what these are called here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """How one architecture names things.

    Args:
        settings: {EncoderConfig's name, or activation: name in config.json}.
        layer: {name of a layer's module: its name here}.
        layers: prefix before a layer's number.
        head: as layer, for the masked-language-model head.
        decoder: the head's output matrix, without .weight and .bias.
        spare: prefixes of weights that a checkpoint may hold, but a masked language model does not use.
    """

    settings: dict[str, str]
    layer: dict[str, str]
    layers: str
    head: dict[str, str]
    decoder: str
    spare: tuple[str, ...]


_BERT_SETTINGS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation": "hidden_act",
}
_BERT_LAYER = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "feed_forward_norm",
}
EMBEDDINGS = {
    "embeddings.word_embeddings.weight": "encoder.tokens.weight",
    "embeddings.position_embeddings.weight": "encoder.positions.weight",
    "embeddings.LayerNorm.weight": "encoder.embedding_norm.weight",
    "embeddings.LayerNorm.bias": "encoder.embedding_norm.bias",
}
TYPES = "embeddings.token_type_embeddings.weight"
FAMILIES = {
    "roberta": Family(
        settings=_BERT_SETTINGS,
        layer=_BERT_LAYER,
        layers="encoder.layer.",
        head={"lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm", "lm_head.bias": "head.bias"},
        decoder="lm_head.decoder",
        spare=("pooler.", "classifier.", "qa_outputs.", "embeddings.position_ids"),
    ),
    "bert": Family(
        settings=_BERT_SETTINGS,
        layer=_BERT_LAYER,
        layers="encoder.layer.",
        head={
            "cls.predictions.transform.dense": "head.dense",
            "cls.predictions.transform.LayerNorm": "head.norm",
            "cls.predictions.bias": "head.bias",
        },
        decoder="cls.predictions.decoder",
        spare=("pooler.", "classifier.", "qa_outputs.", "embeddings.position_ids", "cls.seq_relationship."),
    ),
    "distilbert": Family(
        settings={
            "hidden_size": "dim",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "activation": "activation",
        },
        layer={
            "attention.q_lin": "attention.query",
            "attention.k_lin": "attention.key",
            "attention.v_lin": "attention.value",
            "attention.out_lin": "attention.out",
            "sa_layer_norm": "attention_norm",
            "ffn.lin1": "up",
            "ffn.lin2": "down",
            "output_layer_norm": "feed_forward_norm",
        },
        layers="transformer.layer.",
        head={"vocab_transform": "head.dense", "vocab_layer_norm": "head.norm", "vocab_projector.bias": "head.bias"},
        decoder="vocab_projector",
        spare=("pre_classifier.", "classifier.", "qa_outputs.", "embeddings.position_ids"),
    ),
}
