"""Training steps of public libraries' models: torchvision, transformers, torch_geometric, torchaudio.

The list was written before any of it was measured (`python tools/record.py workloads/field.py OUT`). Models are the
libraries' own, smaller in depth where noted, with random weights and made-up data. `build(device, name)` returns a
callable that runs one step. A name ends in its precision: fp32 (convolutions in TF32, PyTorch's default), tf32
(products too), amp (bfloat16 autocast), fp16 (float16 autocast with a scaler), bf16 (all in bfloat16); `_cl` is channels
last.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
FUSED = partial(torch.optim.AdamW, lr=1e-4, fused=True)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
RMSPROP = partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=1e-3)


def stepper(model, loss_of, precision, optimizer):
    """One step of `loss_of(model)` in a precision."""
    if precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    made = optimizer(model.parameters())
    half = {"amp": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step():
        made.zero_grad(set_to_none=True)
        with torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None):
            loss = loss_of(model)
        if precision == "fp16":
            scaler.scale(loss).backward()
            scaler.step(made)
            scaler.update()
        else:
            loss.backward()
            made.step()

    return step


def named(cases):
    """Cases with the precision in which their names end."""
    return {
        name: (function, {"precision": name.removesuffix("_cl").rsplit("_", 1)[1], **options})
        for name, (function, options) in cases.items()
    }


def imported(function, options, library=""):
    """Import the library that a case needs: that of its function here, else the one given."""
    if function is hf:
        import transformers

        getattr(transformers, options["model"])
    elif function in LIBRARIES or library:
        import_module(LIBRARIES.get(function, library))


def classes(device, batch, count):
    return torch.randint(0, count, (batch,), device=device)


# ---- torchvision


def vision(device, precision, name, batch, size=224, optimizer=SGD, last=False, count=1000, frames=0):
    import torchvision.models as tv

    maker = getattr(tv.video, name) if frames else getattr(tv, name)
    with torch.device(device):
        model = maker(weights=None, num_classes=count)
    shape = (batch, 3, frames, size, size) if frames else (batch, 3, size, size)
    images, labels = torch.randn(shape, device=device), classes(device, batch, count)
    if last:
        model, images = model.to(memory_format=torch.channels_last), images.contiguous(memory_format=torch.channels_last)

    def loss(m):
        out = m(images)
        if isinstance(out, tuple):  # GoogLeNet and Inception with their auxiliary heads
            return sum(w * F.cross_entropy(o, labels) for w, o in zip((1.0, 0.3, 0.3), out) if o is not None)
        return F.cross_entropy(out, labels)

    return stepper(model.train(), loss, precision, optimizer)


def segmentation(device, precision, name, batch, size=480, last=False):
    import torchvision.models.segmentation as seg

    with torch.device(device):
        model = getattr(seg, name)(weights=None, weights_backbone=None, num_classes=21)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, 21, (batch, size, size), device=device)
    if last:
        model, images = model.to(memory_format=torch.channels_last), images.contiguous(memory_format=torch.channels_last)
    return stepper(model.train(), lambda m: F.cross_entropy(m(images)["out"], labels), precision, SGD)


# ---- transformers


def ids(device, batch, length, vocabulary):
    return torch.randint(0, vocabulary, (batch, length), device=device)


def hf(device, precision, config, model, batch_of, optimizer=ADAMW, **options):
    """A model of transformers from its config; `batch_of(device)` makes the inputs, the model computes the loss."""
    import transformers

    with torch.device(device):
        made = getattr(transformers, model)(getattr(transformers, config)(**options))
    if precision == "bf16":
        made = made.to(torch.bfloat16)
    batch = batch_of(device)
    if precision == "bf16":
        batch = {k: v.to(torch.bfloat16) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    return stepper(made.train(), lambda m: m(**batch).loss, precision, optimizer)


def text(batch, length, vocabulary, labels=None):
    """Tokens with their labels: of every token, or with `labels` classes of every sequence."""

    def make(device):
        x = ids(device, batch, length, vocabulary)
        return {"input_ids": x, "labels": x if labels is None else classes(device, batch, labels)}

    return make


def masked(batch, length, vocabulary, labels):
    """Sequences of several lengths, padded, with an attention mask."""

    def make(device):
        lengths = torch.linspace(length // 4, length, batch, device=device).long()
        mask = (torch.arange(length, device=device)[None] < lengths[:, None]).long()
        return {"input_ids": ids(device, batch, length, vocabulary), "attention_mask": mask, "labels": classes(device, batch, labels)}

    return make


def pixels(batch, size=224, labels=1000):
    return lambda device: {
        "pixel_values": torch.randn(batch, 3, size, size, device=device), "labels": classes(device, batch, labels)
    }


def waves(batch, samples, labels=8):
    return lambda device: {
        "input_values": torch.randn(batch, samples, device=device), "labels": classes(device, batch, labels)
    }


def heard(batch, vocabulary, length=64):
    return lambda device: {
        "input_features": torch.randn(batch, 80, 3000, device=device), "labels": ids(device, batch, length, vocabulary)
    }


def scenes(batch, size, labels):
    return lambda device: {
        "pixel_values": torch.randn(batch, 3, size, size, device=device),
        "labels": torch.randint(0, labels, (batch, size, size), device=device),
    }


def pairs(batch, length, size):
    return lambda device: {
        "input_ids": ids(device, batch, length, 49000), "pixel_values": torch.randn(batch, 3, size, size, device=device),
        "return_loss": True,
    }


def series(batch, past, future, width):
    return lambda device: {
        "past_values": torch.randn(batch, past, width, device=device),
        "future_values": torch.randn(batch, future, width, device=device),
    }


# ---- torch_geometric: a graph whose degrees follow a power law, as citation and social graphs' do


def graph(device, nodes, edges, width, skew=1.5):
    places = torch.rand(edges, device=device).pow(skew).mul(nodes).long().clamp(max=nodes - 1)
    others = torch.randint(0, nodes, (edges,), device=device)
    return torch.randn(nodes, width, device=device), torch.stack([others, places])


def geometric(device, precision, name, nodes, edges, width=128, hidden=256, layers=3, count=40, **options):
    import torch_geometric.nn as pyg

    x, index = graph(device, nodes, edges, width)
    labels = classes(device, nodes, count)
    with torch.device(device):
        model = getattr(pyg, name)(width, hidden, layers, count, **options)
    return stepper(model.train(), lambda m: F.cross_entropy(m(x, index), labels), precision, ADAM)


class Pooled(nn.Module):
    """Graph classification: edges with features, sums over each graph's nodes."""

    def __init__(self, width, edge_width, hidden, layers, count):
        super().__init__()
        import torch_geometric.nn as pyg

        self.pool = pyg.global_mean_pool
        self.first, self.edge = nn.Linear(width, hidden), nn.Linear(edge_width, hidden)
        self.layers = nn.ModuleList(
            pyg.GINEConv(nn.Sequential(nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden)))
            for _ in range(layers)
        )
        self.last = nn.Linear(hidden, count)

    def forward(self, x, index, edges, which, graphs):
        x, edges = self.first(x), self.edge(edges)
        for layer in self.layers:
            x = F.relu(layer(x, index, edges))
        return self.last(self.pool(x, which, graphs))


def molecules(device, precision, graphs=512, nodes=24, edges=52, hidden=256):
    total, pairs_ = graphs * nodes, graphs * edges
    x, e = torch.randn(total, 32, device=device), torch.randn(pairs_, 16, device=device)
    first = torch.arange(graphs, device=device).repeat_interleave(edges) * nodes
    index = torch.stack([first + torch.randint(0, nodes, (pairs_,), device=device) for _ in range(2)])
    which = torch.arange(graphs, device=device).repeat_interleave(nodes)
    labels = classes(device, graphs, 12)
    with torch.device(device):
        model = Pooled(32, 16, hidden, 4, 12)
    return stepper(model, lambda m: F.cross_entropy(m(x, index, e, which, graphs), labels), precision, ADAM)


# ---- torchaudio


def conformer(device, precision, batch=16, frames=800):
    import torchaudio

    with torch.device(device):
        model = nn.ModuleList([torchaudio.models.Conformer(256, 4, 1024, 8, 31), nn.Linear(256, 512)])
    x, lengths = torch.randn(batch, frames, 256, device=device), torch.full((batch,), frames, device=device)
    labels = ids(device, batch, frames, 512)

    def loss(m):
        out, _ = m[0](x, lengths)
        return F.cross_entropy(m[1](out).flatten(0, 1).float(), labels.flatten())

    return stepper(model, loss, precision, ADAMW)


def wav2letter(device, precision, batch=16, frames=16000):
    import torchaudio

    with torch.device(device):
        model = torchaudio.models.Wav2Letter(num_classes=40, input_type="waveform")
    x = torch.randn(batch, 1, frames * 4, device=device)

    def loss(m):
        return m(x).float().square().mean()

    return stepper(model, loss, precision, SGD)


def deepspeech(device, precision, batch=32, frames=400):
    import torchaudio

    with torch.device(device):
        model = torchaudio.models.DeepSpeech(161, n_hidden=1024, n_class=40)
    x = torch.randn(batch, 1, frames, 161, device=device)
    labels = ids(device, batch, frames, 40)
    return stepper(
        model, lambda m: F.nll_loss(m(x).flatten(0, 1).float(), labels.flatten()), precision, ADAM
    )


def tasnet(device, precision, batch=4, samples=32000):
    import torchaudio

    with torch.device(device):
        model = torchaudio.models.conv_tasnet_base()
    x, y = torch.randn(batch, 1, samples, device=device), torch.randn(batch, 2, samples, device=device)
    return stepper(model, lambda m: (m(x) - y).square().mean(), precision, ADAM)


def spectrogram(device, precision, batch=64, samples=64000):
    """A mel spectrogram in the step and a small net of 2-D convolutions over it."""
    import torchaudio

    with torch.device(device):
        mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=1024, hop_length=256, n_mels=128)
        layers, wide = [], 1
        for width in (32, 64, 128, 256):
            layers += [nn.Conv2d(wide, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            wide = width
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 50))
    x, labels = torch.randn(batch, samples, device=device), classes(device, batch, 50)
    return stepper(
        model, lambda m: F.cross_entropy(m((mel(x) + 1e-6).log()[:, None]), labels), precision, ADAM
    )


LIBRARIES = {vision: "torchvision", segmentation: "torchvision", geometric: "torch_geometric.nn", molecules: "torch_geometric.nn"}
LIBRARIES |= dict.fromkeys((conformer, wav2letter, deepspeech, tasnet, spectrogram), "torchaudio")
LLM = {"num_hidden_layers": 6, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000, "use_cache": False}
BERT = {"num_hidden_layers": 6}

CASES = {
    # convolutions
    "resnet50_b64_fp32": (vision, dict(name="resnet50", batch=64)),
    "resnext50_b64_amp_cl": (vision, dict(name="resnext50_32x4d", batch=64, last=True)),
    "resnext101_b16_fp32": (vision, dict(name="resnext101_32x8d", batch=16)),
    "wide_resnet50_b32_amp": (vision, dict(name="wide_resnet50_2", batch=32)),
    "densenet121_b48_amp_cl": (vision, dict(name="densenet121", batch=48, last=True)),
    "densenet169_b32_fp32": (vision, dict(name="densenet169", batch=32)),
    "vgg16_bn_b32_fp16": (vision, dict(name="vgg16_bn", batch=32)),
    "efficientnet_b0_b64_amp_cl": (vision, dict(name="efficientnet_b0", batch=64, last=True, optimizer=RMSPROP)),
    "efficientnet_b3_b32_fp32": (vision, dict(name="efficientnet_b3", batch=32, size=300, optimizer=RMSPROP)),
    "efficientnet_v2_s_b32_amp": (vision, dict(name="efficientnet_v2_s", batch=32, size=300)),
    "mobilenet_v2_b96_fp32": (vision, dict(name="mobilenet_v2", batch=96)),
    "mobilenet_v3_large_b128_amp_cl": (vision, dict(name="mobilenet_v3_large", batch=128, last=True)),
    "mnasnet1_b64_fp16": (vision, dict(name="mnasnet1_0", batch=64)),
    "shufflenet_v2_b128_fp32": (vision, dict(name="shufflenet_v2_x1_0", batch=128)),
    "regnet_y_8gf_b32_fp32": (vision, dict(name="regnet_y_8gf", batch=32)),
    "regnet_x_3_2gf_b48_amp_cl": (vision, dict(name="regnet_x_3_2gf", batch=48, last=True)),
    "convnext_tiny_b32_amp": (vision, dict(name="convnext_tiny", batch=32, optimizer=ADAMW)),
    "inception_v3_b32_fp32": (vision, dict(name="inception_v3", batch=32, size=299)),
    "googlenet_b64_amp_cl": (vision, dict(name="googlenet", batch=64, last=True)),
    "squeezenet_b64_fp32": (vision, dict(name="squeezenet1_1", batch=64)),
    "vit_b_16_b32_amp": (vision, dict(name="vit_b_16", batch=32, optimizer=FUSED)),
    "swin_v2_t_b24_amp": (vision, dict(name="swin_v2_t", batch=24, size=256, optimizer=ADAMW)),
    "maxvit_t_b16_amp": (vision, dict(name="maxvit_t", batch=16, optimizer=ADAMW)),
    # segmentation: dilated convolutions
    "deeplabv3_resnet50_b8_fp32": (segmentation, dict(name="deeplabv3_resnet50", batch=8)),
    "deeplabv3_mobilenet_b16_amp": (segmentation, dict(name="deeplabv3_mobilenet_v3_large", batch=16)),
    "fcn_resnet50_b8_amp_cl": (segmentation, dict(name="fcn_resnet50", batch=8, last=True)),
    "lraspp_b16_fp32": (segmentation, dict(name="lraspp_mobilenet_v3_large", batch=16)),
    # video: 3-D convolutions
    "r3d_18_b8_amp": (vision, dict(name="r3d_18", batch=8, size=112, frames=16, count=400)),
    "r2plus1d_18_b8_fp32": (vision, dict(name="r2plus1d_18", batch=8, size=112, frames=16, count=400)),
    "mc3_18_b8_fp32": (vision, dict(name="mc3_18", batch=8, size=112, frames=16, count=400)),
    "s3d_b8_amp": (vision, dict(name="s3d", batch=8, size=224, frames=16, count=400)),
    "mvit_v2_s_b4_amp": (vision, dict(name="mvit_v2_s", batch=4, frames=16, count=400, optimizer=ADAMW)),
    "swin3d_t_b2_amp": (vision, dict(name="swin3d_t", batch=2, frames=16, count=400, optimizer=ADAMW)),
    # text
    "bert_b32_s128_fp16": (hf, dict(config="BertConfig", model="BertForSequenceClassification", batch_of=masked(32, 128, 30522, 2), **BERT)),
    "roberta_b16_s512_amp": (hf, dict(config="RobertaConfig", model="RobertaForMaskedLM", batch_of=text(16, 512, 30522), vocab_size=30522, max_position_embeddings=520, **BERT)),
    "albert_b16_s256_tf32": (hf, dict(config="AlbertConfig", model="AlbertForSequenceClassification", batch_of=text(16, 256, 30000, 2), hidden_size=768, num_attention_heads=12, intermediate_size=3072)),
    "electra_b32_s128_fp32": (hf, dict(config="ElectraConfig", model="ElectraForSequenceClassification", batch_of=masked(32, 128, 30522, 2))),
    "deberta_v2_b8_s256_amp": (hf, dict(config="DebertaV2Config", model="DebertaV2ForSequenceClassification", batch_of=text(8, 256, 128100, 2), hidden_size=768, num_attention_heads=12, intermediate_size=3072, **BERT)),
    "longformer_b2_s2048_amp": (hf, dict(config="LongformerConfig", model="LongformerForSequenceClassification", batch_of=text(2, 2048, 30522, 2), vocab_size=30522, max_position_embeddings=2060, num_hidden_layers=4, attention_window=256)),
    "xlnet_b8_s256_fp32": (hf, dict(config="XLNetConfig", model="XLNetForSequenceClassification", batch_of=text(8, 256, 32000, 2), d_model=768, n_head=12, d_inner=3072, n_layer=6)),
    "gpt2_b8_s512_amp": (hf, dict(config="GPT2Config", model="GPT2LMHeadModel", batch_of=text(8, 512, 50257), n_layer=6, use_cache=False)),
    "gpt_neo_b4_s1024_amp": (hf, dict(config="GPTNeoConfig", model="GPTNeoForCausalLM", batch_of=text(4, 1024, 50257), hidden_size=768, num_layers=6, num_heads=12, attention_types=[[["global", "local"], 3]], use_cache=False)),
    "gemma2_b2_s1024_bf16": (hf, dict(config="Gemma2Config", model="Gemma2ForCausalLM", batch_of=text(2, 1024, 32000), optimizer=FUSED, num_key_value_heads=4, head_dim=128, intermediate_size=4096, sliding_window=256, **LLM)),
    "mistral_b2_s2048_bf16": (hf, dict(config="MistralConfig", model="MistralForCausalLM", batch_of=text(2, 2048, 32000), optimizer=FUSED, num_key_value_heads=4, intermediate_size=2816, sliding_window=512, **LLM)),
    "phi_b4_s512_amp": (hf, dict(config="PhiConfig", model="PhiForCausalLM", batch_of=text(4, 512, 32000), intermediate_size=4096, **LLM)),
    "mixtral_b4_s512_bf16": (hf, dict(config="MixtralConfig", model="MixtralForCausalLM", batch_of=text(4, 512, 32000), num_key_value_heads=4, intermediate_size=1792, num_local_experts=8, **LLM)),
    "olmoe_b4_s512_amp": (hf, dict(config="OlmoeConfig", model="OlmoeForCausalLM", batch_of=text(4, 512, 32000), num_key_value_heads=16, intermediate_size=512, num_experts=32, num_experts_per_tok=4, **LLM)),
    "bart_b8_s256_amp": (hf, dict(config="BartConfig", model="BartForConditionalGeneration", batch_of=text(8, 256, 50265), encoder_layers=4, decoder_layers=4, use_cache=False)),
    "mt5_b8_s256_tf32": (hf, dict(config="MT5Config", model="MT5ForConditionalGeneration", batch_of=text(8, 256, 32128), vocab_size=32128, num_layers=6, decoder_start_token_id=0)),
    "mamba_b4_s512_fp32": (hf, dict(config="MambaConfig", model="MambaForCausalLM", batch_of=text(4, 512, 32000), vocab_size=32000, hidden_size=512, num_hidden_layers=2, use_cache=False)),
    "mamba2_b2_s1024_amp": (hf, dict(config="Mamba2Config", model="Mamba2ForCausalLM", batch_of=text(2, 1024, 32000), vocab_size=32000, hidden_size=512, num_heads=16, head_dim=64, state_size=64, n_groups=1, num_hidden_layers=4, use_cache=False)),
    # images and more in transformers
    "convnextv2_b16_amp": (hf, dict(config="ConvNextV2Config", model="ConvNextV2ForImageClassification", batch_of=pixels(16, labels=2), num_labels=2)),
    "segformer_b8_amp": (hf, dict(config="SegformerConfig", model="SegformerForSemanticSegmentation", batch_of=scenes(8, 512, 150), num_labels=150)),
    "mobilevit_b32_fp32": (hf, dict(config="MobileViTConfig", model="MobileViTForImageClassification", batch_of=pixels(32, 256, 2), num_labels=2)),
    "poolformer_b32_amp": (hf, dict(config="PoolFormerConfig", model="PoolFormerForImageClassification", batch_of=pixels(32, labels=2), num_labels=2)),
    "dinov2_b16_amp": (hf, dict(config="Dinov2Config", model="Dinov2ForImageClassification", batch_of=pixels(16, labels=2), num_labels=2, num_hidden_layers=6)),
    "beit_b16_amp": (hf, dict(config="BeitConfig", model="BeitForImageClassification", batch_of=pixels(16, labels=2), num_labels=2, num_hidden_layers=6, use_relative_position_bias=True)),
    "clip_b32_amp": (hf, dict(config="CLIPConfig", model="CLIPModel", batch_of=pairs(32, 77, 224))),
    "patchtst_b64_fp32": (hf, dict(config="PatchTSTConfig", model="PatchTSTForPrediction", batch_of=series(64, 512, 96, 7), num_input_channels=7, context_length=512, prediction_length=96, patch_length=16, patch_stride=8)),
    # sound
    "wav2vec2_b4_amp": (hf, dict(config="Wav2Vec2Config", model="Wav2Vec2ForSequenceClassification", batch_of=waves(4, 80000), num_hidden_layers=6, apply_spec_augment=False, layerdrop=0.0, num_labels=8)),
    "hubert_b4_fp32": (hf, dict(config="HubertConfig", model="HubertForSequenceClassification", batch_of=waves(4, 48000), num_hidden_layers=4, apply_spec_augment=False, layerdrop=0.0, num_labels=8)),
    "whisper_b4_amp": (hf, dict(config="WhisperConfig", model="WhisperForConditionalGeneration", batch_of=heard(4, 51865), d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, use_cache=False)),
    "conformer_b16_amp": (conformer, {}),
    "wav2letter_b16_fp32": (wav2letter, {}),
    "deepspeech_b32_fp32": (deepspeech, {}),
    "conv_tasnet_b4_fp32": (tasnet, {}),
    "spectrogram_b64_fp32": (spectrogram, {}),
    # graphs
    "gcn_fp32": (geometric, dict(name="GCN", nodes=100_000, edges=1_000_000)),
    "sage_fp32": (geometric, dict(name="GraphSAGE", nodes=60_000, edges=900_000)),
    "gat_fp32": (geometric, dict(name="GAT", nodes=30_000, edges=300_000, heads=4)),
    "gin_tf32": (geometric, dict(name="GIN", nodes=80_000, edges=600_000)),
    "gcn_small_fp32": (geometric, dict(name="GCN", nodes=3_000, edges=12_000, hidden=64)),
    "molecules_fp32": (molecules, {}),
}  # fmt: skip

CASES = named(CASES)


def prepare(name):
    """Import what a case needs, before it has the GPU."""
    imported(*CASES[name])


def build(device, name):
    """The step of a case."""
    function, options = CASES[name]
    return function(device, **options)
