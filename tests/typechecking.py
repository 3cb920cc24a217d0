"""The checker of shapes and types in tests: beartype, with an int where a float is wanted (PEP 484's numeric tower)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
