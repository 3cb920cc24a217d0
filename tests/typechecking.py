"""Check shapes and types in tests with beartype. An int is accepted for a float (PEP 484's numeric tower)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
