"""A placeholder; see the README beside this folder."""

from placeholder import make_placeholder

make_placeholder(__name__)
