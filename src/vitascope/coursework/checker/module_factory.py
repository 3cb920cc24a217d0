"""Create instances of a user's class: choose constructor arguments by name, in several sizes, with random weights."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitascope.coursework.checker.part_checker import (
    Case,
    seed_torch_rng_from_text_temporarily,
    set_seeded_random_weights,
)
from vitascope.coursework.checker.recognition import NUM_HEADS_NAMES, UserCode, normalize_identifier
from vitascope.coursework.checker.weights import find_linear_layers_and_matrices, find_norms

ARGUMENT_NAMES_BY_ROLE = {
    "width": "embeddim dmodel dim modeldim embdim embeddingdim embsize embedsize nembd hiddensize width d dimmodel "
    "features embed emb indim inputdim infeatures embeddingsize inputsize nfeatures dembed latentdim tokendim insize "
    "embdims embeddims dimension featuredim indims dimin din numfeatures outdim outputdim outfeatures dimout dout "
    "outputsize embedding size hiddend tokenwidth hiddenwidth",
    "channels": "inchannels inchans channels numchannels nchannels inchan inch colours colors inputchannels c "
    "inputchans imagechannels imgchannels",
    "hidden": "hiddendim mlpdim ffdim dff ffndim dimfeedforward feedforwarddim hidden hiddenfeatures mlphidden "
    "ffhidden "
    "mlpwidth ffwidth hiddenwidth mlpsize dimff intermediatesize dinner innerdim dhidden mlphiddendim hiddenunits dmlp",
    "ratio": "mlpratio ratio expansion mult ffmult expansionfactor forwardexpansion multiplier expand hiddenratio",
    "dropout": "dropout drop droprate dropoutrate pdrop attndrop dropoutp attndropout projdrop p pdropout resdropout "
    "embdropout ffdropout attndroprate projdroprate attentiondropout posdroprate dropprob",
    "image": "img imgsize imagesize size inputresolution resolution imageside imgdim",
    "patch": "patchsize patch patchside patchdim",
    "classes": "numclasses nclasses classes outdim outputdim outd nclass numlabels numclass outfeatures nout",
    "depth": "depth numlayers nlayers layers nblocks numblocks blocks nlayer numencoderlayers nblock n l",
    "patches": "numpatches npatchestotal seqlength numpatch patchcount npatch",
    "side": "npatches patchesperside",
    "length": "maxlen maxlength blocksize contextlength seqlen contextsize maxseqlen numtokens maxtokens length "
    "sequencelength ntokens maxposition numpositions npositions maxpositions positions ctxlen t",
    "key_width": "headdim dk headsize keydim headwidth dhead dimhead dkey dq dqk dimk qkdim keywidth",
    "value_width": "dv valuedim dimv dvalue valuewidth",
    "temperature": "temperature temp",
    "batch_first": "batchfirst",
    "chw": "chw",
}
ROLE_BY_ARGUMENT_NAME = {name: role for role, names in ARGUMENT_NAMES_BY_ROLE.items() for name in names.split()}


class UnknownArgumentError(TypeError):
    """A required constructor argument has an unknown meaning."""


def guess_size_name(argument_name: str, all_argument_names: set[str], sizes: Mapping[str, Any]) -> str | None:
    """Return the size that an argument stands for; next to embed_dim, hidden_dim is the width of the MLP."""
    normalized = normalize_identifier(argument_name)
    if normalized in NUM_HEADS_NAMES and not (normalized == "h" and "heads" not in sizes):
        return "heads"
    role = ROLE_BY_ARGUMENT_NAME.get(normalized)
    if role is None and "drop" in normalized:
        role = "dropout"
    if normalized in ("hiddendim", "hidden", "hiddensize", "hiddenwidth") and "hidden" in sizes:
        other_widths = {
            name
            for name in all_argument_names
            if name != normalized and ROLE_BY_ARGUMENT_NAME.get(name) == "width" and name not in ("outdim", "outputdim")
        }
        role = "hidden" if other_widths else "width"
    elif role == "hidden" and "hidden" not in sizes:
        role = "width"
    if role == "channels" and "channels" not in sizes:
        role = "width"
    if normalized in ("outdim", "outputdim", "outfeatures", "outd") and "classes" in sizes:
        role = "classes"
    if normalized == "size":
        role = "image" if "image" in sizes else "width"
    return role


def choose_constructor_arguments(
    cls: type, sizes: Mapping[str, Any], size_order: tuple[str, ...] = ("width", "heads")
) -> dict[str, Any]:
    """Return the constructor arguments by name.

    Required arguments with an unknown role get the unused sizes in `size_order`."""
    parameters = list(inspect.signature(cls).parameters.values())
    arguments, unknown, used = {}, [], set()
    all_names = {normalize_identifier(parameter.name) for parameter in parameters}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = guess_size_name(parameter.name, all_names, sizes)
        if normalize_identifier(parameter.name) == "p" and type(parameter.default) is int and "patch" in sizes:
            role = "patch"
        if role is not None and role in sizes:
            if role == "ratio" and parameter.default is not parameter.empty:
                continue
            arguments[parameter.name], used = sizes[role], used | {role}
        elif parameter.default is parameter.empty:
            unknown.append(parameter.name)
    unused = [role for role in size_order if role not in used and role in sizes]
    if len(unknown) > len(unused):
        raise UnknownArgumentError(
            f"the constructor argument {unknown[len(unused)]!r} of {cls.__name__} has an unknown meaning"
        )
    return arguments | {name: sizes[role] for name, role in zip(unknown, unused, strict=False)}


def build_instance_with_sizes(
    cls: type, sizes: Mapping[str, Any], size_order: tuple[str, ...] = ("width", "heads")
) -> nn.Module:
    """Create an instance with these sizes."""
    return cls(**choose_constructor_arguments(cls, sizes, size_order))


def has_constructor_size_argument(cls: type, size_name: str, sizes: Mapping[str, Any]) -> bool:
    """Return whether the constructor has an argument of this role."""
    names = list(inspect.signature(cls).parameters)
    return any(guess_size_name(name, {normalize_identifier(n) for n in names}, sizes) == size_name for name in names)


def find_num_heads_attribute(module: nn.Module) -> int | None:
    """Return the number of heads that an instance or one of its submodules stores, or None."""
    for part in module.modules():
        for name, value in vars(part).items():
            if type(value) is int and normalize_identifier(name) in NUM_HEADS_NAMES:
                return value
    return None


class ModuleFactory:
    """Create instances of a class, one for each combination of sizes and dtype."""

    def __init__(
        self, user_code: UserCode, sizes: Mapping[str, Any], size_order: tuple[str, ...] = ("width", "heads")
    ) -> None:
        self.user_code: Any = user_code
        self.sizes, self.size_order = dict(sizes), size_order
        self.module_cache: dict[tuple[Any, ...], nn.Module] = {}
        self.fixed_sizes: dict[str, int] = {}
        if isinstance(user_code, nn.Module):
            self.fixed_sizes = {
                "width": infer_width(user_code, default=12),
                "heads": find_num_heads_attribute(user_code) or 1,
            }
            self.has_heads = find_num_heads_attribute(user_code) is not None
        else:
            self.has_heads = (
                has_constructor_size_argument(self.user_code, "heads", self.sizes)
                or "heads" in size_order[: self._count_inferred_sizes()]
            )
            if not self.has_heads:
                self.fixed_sizes = {"heads": find_num_heads_attribute(self.get_or_build_module({})) or 1}
                self.has_heads = self.fixed_sizes["heads"] > 1

    def _count_inferred_sizes(self) -> int:
        arguments = choose_constructor_arguments(self.user_code, self.sizes, self.size_order)
        return 2 if list(arguments.values()).count(self.sizes.get("heads")) else 0

    def get_or_build_module(
        self, sizes: Mapping[str, int], dtype: torch.dtype = torch.float64, training: bool = False
    ) -> nn.Module:
        """Return an instance, by default in eval mode."""
        all_sizes = {name: sizes.get(name, size) for name, size in self.sizes.items()}
        for name in {"key_width", "value_width"} & all_sizes.keys():
            all_sizes[name] = all_sizes["width"] // all_sizes["heads"]
        key = (*all_sizes.values(), dtype)
        if key not in self.module_cache:
            with seed_torch_rng_from_text_temporarily("building"):
                is_instance = isinstance(self.user_code, nn.Module)
                module = (
                    copy.deepcopy(self.user_code)
                    if is_instance
                    else build_instance_with_sizes(self.user_code, all_sizes, self.size_order)
                )
            module = module.to(dtype=torch.float64)
            set_seeded_random_weights(module)
            self.module_cache[key] = module.to(dtype=dtype)
        return self.module_cache[key].train(training)

    def resize_case_if_possible(self, case: Case) -> Case | None:
        """Return the case with the module's fixed sizes, or None if it does not fit or would be a duplicate."""
        sizes = dict(case.sizes) | {name: size for name, size in self.fixed_sizes.items() if name in case.sizes}
        if sizes == dict(case.sizes):
            return case
        if case.tiny or case.name == "one head":
            return None
        if sizes["width"] % sizes["heads"]:
            return None
        return replace(case, sizes=sizes, name=case.name.replace("three heads, ", ""))


def infer_width(module: nn.Module, *, default: int) -> int:
    """Return the width of the first LayerNorm, else the input width of the first linear layer, else `default`."""
    for _, norm in find_norms(module):
        if isinstance(norm, nn.LayerNorm):
            return int(norm.normalized_shape[-1])
    linear_layers = find_linear_layers_and_matrices(module)
    return linear_layers[0].shape[1] if linear_layers else default
