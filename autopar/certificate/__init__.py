"""Certify every emitted program: type each value by how it lies on the mesh, and refuse what does not follow.

    types.py    how a value lies, axis by axis, seen from what one device holds
    readings.py which dims of a view have the rows and the cuts of those of its operand
    rules.py    the result types of each op: elementwise.py, views.py, reductions.py, products.py, layers.py and
                experts.py have a rule for each, over calls.py
    steps.py    what each collective, and each local step, changes
    host.py     values that wait on the host leave and return once, and nothing reads or writes their memory meanwhile
    walk.py     forward and backward of a program, from how parameters are stored to how gradients have to lie

It knows the emitted graphs, how parameters are stored, and how outputs leave; it knows nothing of the plan in between,
and shares no code with the lowering that it checks. Every lowering asks for one, unless AUTOPAR_CERTIFICATE is "off".
"""

from autopar.certificate.walk import VARIABLE, Certificate, Interface, certify, is_wanted

__all__ = ["VARIABLE", "Certificate", "Interface", "certify", "is_wanted"]
