"""Every architecture that hotneuron runs, by the name that files give it."""

from hotneuron.models.architectures.architecture import Architecture
from hotneuron.models.architectures.bamboo import BAMBOO
from hotneuron.models.architectures.falcon import FALCON
from hotneuron.models.architectures.llama import LLAMA
from hotneuron.models.architectures.opt import OPT
from hotneuron.models.architectures.qwen2 import QWEN2
from hotneuron.models.architectures.qwen3 import QWEN3

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for architecture in (LLAMA, QWEN2, QWEN3, BAMBOO, FALCON, OPT)
}
