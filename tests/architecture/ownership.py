# SPDX-License-Identifier: Apache-2.0
"""Statements that reach into an object of somebody else: assignments of its attributes, uses of its private names."""

import ast
from collections.abc import Iterator

OWN = ("self", "cls")

PUBLIC = ("_asdict", "_exit", "_fields", "_replace")
"""Names of the standard library that its documentation names as public: their underscore keeps them from fields."""

PYSPARK = ("_gateway", "_jdf", "_jsc", "_jsparkSession", "_jvm")
"""Names of pyspark for objects of Java, to which it has no public way."""

OURS = ("mqtt_nats", "mqtt_streams", "pyspark_mqtt_nats")


def _name(node: ast.expr) -> str:
    """The last name of the object: ``client`` for ``client`` and for ``self.client``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return "()"


def _own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in OWN


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in (*PUBLIC, *PYSPARK)


def foreign_assignments(tree: ast.Module) -> Iterator[str]:
    """``object.attribute`` for each attribute that is assigned to anything but ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and not _own(node.value):
            yield f"{_name(node.value)}.{node.attr}"


def private_names(tree: ast.Module) -> Iterator[str]:
    """``object._name`` for each private name of another module: imported, or used on anything but ``self``."""
    of_this_module = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own(node.value)
    }
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                of_this_module.add(name)
            case ast.Constant(value=str(name)):  # in __slots__
                of_this_module.add(name)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names) if (module or "").startswith(OURS):
                yield from (f"{module}.{one.name}" for one in names if _private(one.name))
            case ast.Attribute(value=value, attr=name) if _private(name):
                if not _own(value) and name not in of_this_module:
                    yield f"{_name(value)}.{name}"
