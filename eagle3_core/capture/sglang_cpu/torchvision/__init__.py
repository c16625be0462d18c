"""A placeholder; see the README beside this folder."""

from placeholder import make_placeholder

make_placeholder(__name__)

__version__ = "0.0"
