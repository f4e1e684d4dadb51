"""Functions of formulas.py in JavaScript, for pages that compute with them in a browser.

They are translated when a page is made, so that there is one source: what Python and JavaScript
write differently is little, and all that formulas use of it is below. Anything else is refused.
"""

import ast

BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
COMPARED = {
    ast.Eq: "===", ast.NotEq: "!==", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
OF_MATH = ("min", "max", "ceil")


def javascript(source: str, name: str) -> str:
    """All functions of a Python module, as those of an object of this name.

    Raises:
        ValueError: it has something that is not translated, with its line.
    """
    found, names = [], []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found.append(_function(node))
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            found.append(f"const {_assigned(node)};")
    inside = "\n".join(found)
    return f"const {name} = (() => {{\n{inside}\nreturn {{ {', '.join(names)} }};\n}})();"


def _function(node: ast.FunctionDef) -> str:
    args = node.args.args
    defaults = [None] * (len(args) - len(node.args.defaults)) + node.args.defaults
    given = ", ".join(
        arg.arg if default is None else f"{arg.arg} = {_value(default)}"
        for arg, default in zip(args, defaults, strict=True)
    )
    body = " ".join(_statement(it) for it in node.body)
    return f"function {node.name}({given}) {{ {body} }}"


def _statement(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return ""  # the docstring
    if isinstance(node, ast.Return) and node.value:
        return f"return {_value(node.value)};"
    if isinstance(node, ast.Assign):
        return f"const {_assigned(node)};"
    if isinstance(node, ast.If) and not node.orelse:
        return f"if ({_value(node.test)}) {{ {' '.join(map(_statement, node.body))} }}"
    raise _unknown(node)


def _assigned(node: ast.Assign) -> str:
    """``a = b``, and ``a, b = c, d``."""
    return f"{_value(node.targets[0])} = {_value(node.value)}"


def _value(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() as value):
            return repr(value).lower() if isinstance(value, bool) else repr(value)
        case ast.Name(id=name):
            return f"Math.{name}" if name in OF_MATH else name
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return f"({_value(left)} {BINARY[type(op)]} {_value(right)})"
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple() as several]):
            return f"{_value(several)}.includes({_value(left)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
            return f"({_value(left)} {COMPARED[type(op)]} {_value(right)})"
        case ast.BoolOp(op=op, values=values):
            return f"({(' && ' if isinstance(op, ast.And) else ' || ').join(map(_value, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"!{_value(operand)}"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_value(test)} ? {_value(body)} : {_value(orelse)})"
        case ast.Call(func=ast.Name() as name, args=args, keywords=[]):
            return f"{_value(name)}({', '.join(map(_value, args))})"
        case ast.Tuple(elts=values):
            return f"[{', '.join(map(_value, values))}]"
    raise _unknown(node)


def _unknown(node: ast.AST) -> ValueError:
    return ValueError(f"line {node.lineno}: {ast.unparse(node)!r} is not translated")  # type: ignore[attr-defined]
