"""A stand-in engine environment for tests of the orchestration alone.

`make_engine(folder)` makes an interpreter whose steps write small artifacts of the right plans through the
real step boundary, in a tenth of a second and without torch. What the artifacts contain means nothing: every
test of content uses the real engine environment. `FAULT` in the step's environment makes one step misbehave.
"""
