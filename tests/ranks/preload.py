"""Imported last by the process that ranks are forked from: what is slow to import, once for all of them."""

import gc

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

gc.collect()
gc.freeze()  # a rank looks through its own garbage only
