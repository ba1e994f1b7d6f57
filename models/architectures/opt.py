"""OPT as PowerInfer converts it: learned positions, ReLU, no gate, biases everywhere; the head is the embedding."""

from hotneuron.models.architectures.architecture import Architecture

OPT = Architecture(
    name="opt",
    rope_style="half",  # not used
    qkv_bias="always",
    qk_norm="never",
    activation="relu",
    gated=False,
    norm="layer",
    default_norm_eps=1e-5,  # no file says it
    positions="learned",
    linear_bias=True,
)
