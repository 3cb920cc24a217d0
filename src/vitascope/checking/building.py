"""Create an instance of a user's class: choose a value for each constructor argument by its name."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from vitascope.checking.naming import HEADS, compact

NAMES = {
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
ROLES = {name: role for role, names in NAMES.items() for name in names.split()}


class UnknownArgumentError(TypeError):
    """A required constructor argument has an unknown meaning."""


def size_role(name: str, others: set[str], sizes: Mapping[str, Any]) -> str | None:
    """Which of our sizes an argument means; a hidden_dim beside an embed_dim is the feed-forward layer's."""
    word = compact(name)
    if word in HEADS and not (word == "h" and "heads" not in sizes):
        return "heads"
    role = ROLES.get(word)
    if role is None and "drop" in word:
        role = "dropout"
    if word in ("hiddendim", "hidden", "hiddensize", "hiddenwidth") and "hidden" in sizes:
        first = {o for o in others if o != word and ROLES.get(o) == "width" and o not in ("outdim", "outputdim")}
        role = "hidden" if first else "width"
    elif role == "hidden" and "hidden" not in sizes:
        role = "width"
    if role == "channels" and "channels" not in sizes:
        role = "width"
    if word in ("outdim", "outputdim", "outfeatures", "outd") and "classes" in sizes:
        role = "classes"
    if word == "size":
        role = "image" if "image" in sizes else "width"
    return role


def arguments_for(cls: type, sizes: Mapping[str, Any], order: tuple[str, ...] = ("width", "heads")) -> dict[str, Any]:
    """The constructor's arguments by name; required ones that say nothing get the sizes not yet used, in order."""
    parameters = list(inspect.signature(cls).parameters.values())
    given, unknown, used = {}, [], set()
    others = {compact(parameter.name) for parameter in parameters}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = size_role(parameter.name, others, sizes)
        if compact(parameter.name) == "p" and type(parameter.default) is int and "patch" in sizes:
            role = "patch"
        if role is not None and role in sizes:
            if role == "ratio" and parameter.default is not parameter.empty:
                continue
            given[parameter.name], used = sizes[role], used | {role}
        elif parameter.default is parameter.empty:
            unknown.append(parameter.name)
    left = [role for role in order if role not in used and role in sizes]
    if len(unknown) > len(left):
        raise UnknownArgumentError(
            f"the constructor argument {unknown[len(left)]!r} of {cls.__name__} has an unknown meaning"
        )
    return given | {name: sizes[role] for name, role in zip(unknown, left, strict=False)}


def build(cls: type, sizes: Mapping[str, Any], order: tuple[str, ...] = ("width", "heads")) -> nn.Module:
    """An instance with our sizes."""
    return cls(**arguments_for(cls, sizes, order))


def takes(cls: type, role: str, sizes: Mapping[str, Any]) -> bool:
    """Tell whether the constructor asks for it."""
    names = list(inspect.signature(cls).parameters)
    return any(size_role(name, {compact(n) for n in names}, sizes) == role for name in names)


def heads_of(module: nn.Module) -> int | None:
    """The number of heads that an instance remembers, itself or in one of its parts."""
    for part in module.modules():
        for name, value in vars(part).items():
            if type(value) is int and compact(name) in HEADS:
                return value
    return None
