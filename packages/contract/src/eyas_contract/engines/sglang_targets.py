"""SGLang's target classes: which hand aux states to an EAGLE-3 draft, and how each reads the layer ids. Data only.

Read from `set_eagle3_layers_to_capture` of every class in `srt/models/` (own or inherited) in the wheels of SGLang
0.5.10 to 0.5.23; a test runs the installed version's own methods against these rows.
"""

from __future__ import annotations

from typing import Literal

Version = tuple[int, int, int]
Rule = Literal["output", "first-id", "final-id", "always-plus", "marks-nothing", "no-hook"]

# Ids mean: `output` = output of layer k (the hook adds one; without ids the boundaries 2, n//2, n-3 are taken as they
# are). `first-id` = adds one only where the first id is 1. `final-id` = takes ids as boundaries where the largest is
# the number of layers, else adds one. `always-plus` = adds one, to the defaults too. `marks-nothing` = the list is
# stored, but the model looks at marks on its layers that nobody sets. `no-hook` = no method, or no such class.
OUTPUT: Rule = "output"
FIRST_ID: Rule = "first-id"
FINAL_ID: Rule = "final-id"
ALWAYS_PLUS: Rule = "always-plus"
MARKS_NOTHING: Rule = "marks-nothing"
NO_HOOK: Rule = "no-hook"

_SINCE_BEFORE: Version = (0, 5, 10)
_PLAIN = (
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "ExaoneMoEForCausalLM", "Glm4MoeForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM",
    "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LongcatFlashForCausalLM",
    "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM", "SarvamMoEForCausalLM", "TeleFLMForCausalLM",
)
# Class -> (first version, rule) pairs, oldest first; each holds until the next.
HOOKS: dict[str, tuple[tuple[Version, Rule], ...]] = dict.fromkeys(_PLAIN, ((_SINCE_BEFORE, OUTPUT),)) | {
    "Cosmos3ForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 20), OUTPUT)),
    "DeepseekV2ForCausalLM": (((0, 5, 10), OUTPUT), ((0, 5, 13), FIRST_ID)),
    "DeepseekV32ForCausalLM": (((0, 5, 10), OUTPUT), ((0, 5, 13), FIRST_ID)),
    "DeepseekV3ForCausalLM": (((0, 5, 10), OUTPUT), ((0, 5, 13), FIRST_ID)),
    "ExaoneMoeForCausalLM": (((0, 5, 10), NO_HOOK), ((0, 5, 22), OUTPUT)),
    "Gemma3ForCausalLM": (((0, 5, 10), NO_HOOK), ((0, 5, 12), OUTPUT)),
    "Gemma3ForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 12), OUTPUT)),
    "Gemma4ForCausalLM": (((0, 5, 10), NO_HOOK), ((0, 5, 12), OUTPUT)),
    "Gemma4ForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 12), OUTPUT)),
    "Gemma4UnifiedForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 13), OUTPUT)),
    "Glm4MoeLiteForCausalLM": (((0, 5, 10), OUTPUT), ((0, 5, 13), FIRST_ID)),
    "Glm5NextForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 20), OUTPUT)),
    "GlmMoeDsaForCausalLM": (((0, 5, 10), OUTPUT), ((0, 5, 13), FIRST_ID)),
    "GptOssForCausalLM": (((0, 5, 10), OUTPUT), ((0, 5, 17), FINAL_ID)),
    "InternS1ProForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 11), OUTPUT)),
    "InternS2MobiusForConditionalGeneration": (
        ((0, 5, 10), NO_HOOK), ((0, 5, 18), MARKS_NOTHING), ((0, 5, 22), OUTPUT)),
    "InternS2PreviewForConditionalGeneration": (
        ((0, 5, 10), NO_HOOK), ((0, 5, 12), MARKS_NOTHING), ((0, 5, 22), OUTPUT)),
    "KimiK25ForConditionalGeneration": (((0, 5, 10), OUTPUT), ((0, 5, 13), FIRST_ID)),
    "MellumForCausalLM": (((0, 5, 10), NO_HOOK), ((0, 5, 16), OUTPUT)),
    "MiniMaxM3SparseForCausalLM": (((0, 5, 10), NO_HOOK), ((0, 5, 16), MARKS_NOTHING), ((0, 5, 18), OUTPUT)),
    "MiniMaxM3SparseForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 18), ALWAYS_PLUS)),
    "MistralLarge3ForCausalLM": (((0, 5, 10), OUTPUT), ((0, 5, 13), FIRST_ID)),
    "Qwen3VLForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 11), OUTPUT)),
    "Qwen3VLMoeForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 11), OUTPUT)),
    "Qwen3_5ForCausalLM": (((0, 5, 10), NO_HOOK), ((0, 5, 22), OUTPUT)),
    "Qwen3_5ForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 11), MARKS_NOTHING), ((0, 5, 22), OUTPUT)),
    "Qwen3_5MoeForCausalLM": (((0, 5, 10), NO_HOOK), ((0, 5, 22), OUTPUT)),
    "Qwen3_5MoeForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 11), MARKS_NOTHING), ((0, 5, 22), OUTPUT)),
    "Qwen4ExpForConditionalGeneration": (((0, 5, 10), NO_HOOK), ((0, 5, 20), MARKS_NOTHING), ((0, 5, 22), OUTPUT)),
}
# Registered model classes of the same versions without any hook.
WITHOUT_HOOK = frozenset({
    "AfmoeForCausalLM", "ArceeForCausalLM", "BaichuanForCausalLM", "BailingMM2NativeForConditionalGeneration",
    "BailingMMNativeForConditionalGeneration", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration", "BeamForCausalLM", "ChatGLMModel", "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM", "Cohere2VisionForConditionalGeneration", "CohereForCausalLM",
    "Cosmos3EdgeForConditionalGeneration", "DbrxForCausalLM", "DeciLMForCausalLM", "DeepseekForCausalLM",
    "DeepseekOCRForCausalLM", "DeepseekV4ForCausalLM", "DeepseekVL2ForCausalLM", "DiffusionGemmaForBlockDiffusion",
    "Dots3NoteForCausalLM", "DotsOCRForCausalLM", "DotsVLMForCausalLM", "Ernie4_5_ForCausalLM",
    "Ernie4_5_MoeForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration", "Exaone4ForCausalLM", "ExaoneForCausalLM",
    "FalconH1ForCausalLM", "FalconMambaForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM",
    "Gemma2ForCausalLM", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "GemmaForCausalLM",
    "GigaChat35ForCausalLM", "Glm4ForCausalLM", "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "GlmAsrForConditionalGeneration", "GlmImageForConditionalGeneration", "GlmOcrForConditionalGeneration",
    "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM", "Grok1ForCausalLM", "Grok1ModelForCausalLM",
    "HYV3ForCausalLM", "HYV4ForCausalLM", "HrmTextForCausalLM", "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM", "IQuestLoopCoderForCausalLM", "IQuestQ1ForCausalLM",
    "InklingForConditionalGeneration", "InternLM2ForCausalLM", "InternS1ForConditionalGeneration",
    "InternVLChatModel", "JetNemotronForCausalLM", "JetVLMForConditionalGeneration", "K2HorizonForCausalLM",
    "KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM", "KimiLinearForCausalLM",
    "KimiVLForConditionalGeneration", "LLaDA2MoeModelLM", "LagunaForCausalLM", "Lfm2BidirectionalModel",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration", "LightOnOCRForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM",
    "LlavaVidForCausalLM", "LocateAnythingForConditionalGeneration", "Mamba2ForCausalLM", "MambaForCausalLM",
    "MiDashengLMModel", "MiMoForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiniCPM3ForCausalLM",
    "MiniCPMForCausalLM", "MiniCPMO", "MiniCPMSALAForCausalLM", "MiniCPMV", "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration", "Mistral3ForConditionalGeneration", "MistralModel", "MixtralForCausalLM",
    "MllamaForConditionalGeneration", "MossVLForConditionalGeneration", "MultiModalityCausalLM",
    "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration", "MuseSparkForConditionalGeneration",
    "NVILAForConditionalGeneration", "NVILALiteForConditionalGeneration", "NanbeigeForCausalLM",
    "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2",
    "NemotronH_Omni_Reasoning_V3", "OPTForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM",
    "OrionForCausalLM", "POINTSV15ChatModel", "PaddleOCRVLForConditionalGeneration", "PersimmonForCausalLM",
    "Phi3SmallForCausalLM", "Phi4MMForCausalLM", "PhiForCausalLM", "PhiMoEForCausalLM",
    "PixtralForConditionalGeneration", "QWenLMHeadModel", "QuantMixtralForCausalLM",
    "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen3Model",
    "Qwen3OmniMoeForConditionalGeneration", "SDARForCausalLM", "SDARMoeForCausalLM", "Sarashina2VisionForCausalLM",
    "SarvamMLAForCausalLM", "SolarForCausalLM", "Spark2_5ForCausalLM", "StableLmForCausalLM",
    "Starcoder2ForCausalLM", "Step3VLForConditionalGeneration", "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration", "StepVLForConditionalGeneration", "TorchNativeLlamaForCausalLM",
    "TorchNativePhi3ForCausalLM", "TransformersForCausalLM", "TransformersMoEForCausalLM",
    "TransformersMultiModalForCausalLM", "TransformersMultiModalMoEForCausalLM", "UnlimitedOCRForCausalLM",
    "VoxtralForConditionalGeneration", "XLMRobertaModel", "XllmForCausalLM", "XverseForCausalLM",
    "XverseMoeForCausalLM", "YiVLForCausalLM", "ZayaForCausalLM",
})

# Classes that hand over the output of the last layer too (boundary n), by the version that learned it.
CAPTURES_LAST_LAYER: dict[str, Version] = {"GptOssForCausalLM": (0, 5, 17),
                                           "MiniMaxM3SparseForCausalLM": (0, 5, 23),
                                           "MiniMaxM3SparseForConditionalGeneration": (0, 5, 23)}


def rule(architecture: str, version: Version) -> Rule | None:
    """How this class reads layer ids in this version; None for a class that no known version has."""
    if architecture in WITHOUT_HOOK:
        return NO_HOOK
    current: Rule | None = None
    for since, name in HOOKS.get(architecture, ()):
        if version >= since or current is None:
            current = name
    return current


def hook_since(architecture: str) -> Version | None:
    """The first version in which this class can hand over aux states."""
    return next((since for since, name in HOOKS.get(architecture, ()) if name not in (NO_HOOK, MARKS_NOTHING)), None)


def captures(architecture: str, num_layers: int, version: Version) -> int:
    """The largest layer (0-based) whose output this class can hand over."""
    since = CAPTURES_LAST_LAYER.get(architecture)
    return num_layers - 1 if since is not None and version >= since else num_layers - 2
