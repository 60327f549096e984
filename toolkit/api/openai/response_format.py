"""Constraints on an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool

from toolkit.api.http.body_fields import Body, Text, encodable
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sampling.structured_outputs import StructuredOutputsParams

Schema = Annotated[dict[str, Any], AfterValidator(encodable)]


class JsonSchemaFormat(Body):
    name: Text = Field("", description="Accepted for compatibility; not shown to the model")
    description: Text | None = Field(
        None, description="Accepted for compatibility; not shown to the model"
    )
    schema_: Schema | None = Field(
        None, alias="schema", description="JSON schema of the answer; default: any JSON object"
    )
    strict: StrictBool | None = Field(
        None,
        description="true: allow only properties that the schema names, and refuse keywords that "
        "cannot be enforced; default: ignore such keywords",
    )


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(
        None, alias="schema", description="JSON schema next to the type, as llama.cpp has it"
    )
    format: Schema | None = Field(
        None, description="Of a structural_tag, as xgrammar and vLLM describe it"
    )
    structures: list[Schema] | None = Field(
        None, description="Of a structural_tag without format: objects with begin, schema and end"
    )
    triggers: list[Text] | None = Field(
        None, description="Texts with which the begins of structures begin"
    )

    def to_params(self) -> StructuredOutputsParams | None:
        """Raises InvalidParamError if fields are missing, or given with another type."""
        tag = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        tag = {name: value for name, value in tag.items() if value is not None}
        if self.type == "structural_tag" and self.json_schema is None:
            return StructuredOutputsParams(
                structural_tag=tag, lenient=True, param="response_format"
            )
        if tag:
            raise InvalidParamError(
                "response_format", f"takes {min(tag)} with the type structural_tag alone."
            )
        schema = self.json_schema
        if self.schema_ is not None:
            if schema is not None or not self.type.startswith("json"):
                raise InvalidParamError(
                    "response_format",
                    "takes schema with the type json_object, or json_schema without json_schema.",
                )
            return StructuredOutputsParams(json=self.schema_, lenient=True, param="response_format")
        return constraint_of(self.type, schema, param="response_format")


def constraint_of(
    kind: str, schema: JsonSchemaFormat | None, *, param: str
) -> StructuredOutputsParams | None:
    """Return the constraint of a format of the type `kind`, which `param` of the request has.

    Raises InvalidParamError if the schema is missing, or given with another type."""
    if (kind == "json_schema") != (schema is not None):
        raise InvalidParamError(
            param, "needs json_schema with the type json_schema, and takes it with no other type."
        )
    if kind == "text":
        return None
    if schema is None or schema.schema_ is None:
        return StructuredOutputsParams(json_object=True, param=param)
    return StructuredOutputsParams(json=schema.schema_, lenient=not schema.strict, param=param)


class StructuredOutputs(Body):
    """Exactly one of these constraints."""

    json_: Schema | Text | None = Field(
        None, alias="json", description="JSON schema that the answer satisfies"
    )
    json_object: StrictBool | None = Field(None, description="true: the answer is a JSON object")
    regex: Text | None = Field(
        None, description="Regular expression that matches the complete answer"
    )
    choice: list[Text] | None = Field(None, description="The answer is one of these texts")
    structural_tag: Schema | Text | None = Field(
        None, description="Free text with constrained parts, as xgrammar and vLLM describe it"
    )
    grammar: Text | None = Field(
        None, description="Grammar of the answer, in Lark (as llguidance extends it) or GBNF"
    )

    def to_params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            json=self.json_,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            structural_tag=self.structural_tag,
        )


def resolve_constraint(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    grammar: str = "",
    json_schema: dict[str, Any] | None = None,
) -> StructuredOutputsParams | None:
    """Return the answer's constraint, if any. Raises InvalidRequestError if there are two.

    `grammar` and `json_schema` are fields of llama.cpp."""
    found = {"response_format": None if response_format is None else response_format.to_params()}
    if structured_outputs is not None:
        found["structured_outputs"] = structured_outputs.to_params()
    if grammar:
        found["grammar"] = StructuredOutputsParams(grammar=grammar, param="grammar")
    if json_schema is not None:
        found["json_schema"] = StructuredOutputsParams(
            json=json_schema, lenient=True, param="json_schema"
        )
    given = {name: one for name, one in found.items() if one is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise InvalidRequestError(f"{first} and {second} exclude each other.", param=second)
    return next(iter(given.values()), None)
