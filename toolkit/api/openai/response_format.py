"""What a request says of the form of its answer: `response_format` is OpenAI's, `structured_outputs` vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from toolkit.api.http.body_fields import Body, Text, encodable
from toolkit.errors import InvalidRequestError
from toolkit.sampling.structured_outputs import StructuredOutputsParams

Schema = Annotated[dict[str, Any], AfterValidator(encodable)]


class JsonSchemaFormat(Body):
    name: Text = Field("", description="Taken for compatibility; the model is not told")
    description: Text | None = Field(
        None, description="Taken for compatibility; the model is not told"
    )
    schema_: Schema | None = Field(
        None, alias="schema", description="Any JSON object when there is none"
    )
    strict: bool | None = Field(
        None,
        description="Refuses a schema that cannot be held wholly; otherwise its unsupported keywords are passed over",
    )


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    def asked(self) -> StructuredOutputsParams | None:
        """Raises InvalidRequestError when the schema is missing, or there where none belongs."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format has json_schema with the type json_schema, and with no other.",
                param="response_format",
            )
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return StructuredOutputsParams(json_object=True, param="response_format")
        return StructuredOutputsParams(
            json=self.json_schema.schema_,
            lenient=not self.json_schema.strict,
            param="response_format",
        )


class StructuredOutputs(Body):
    """One of them."""

    json_: Schema | Text | None = Field(
        None, alias="json", description="A JSON schema that the answer fits"
    )
    json_object: bool | None = Field(None, description="The answer is some JSON object")
    regex: Text | None = Field(
        None, description="A regular expression that matches the whole answer"
    )
    choice: list[Text] | None = Field(None, description="The answer is one of these texts")
    grammar: Text | None = Field(
        None, description="A grammar, in Lark (as llguidance extends it) or GBNF"
    )

    def asked(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            json=self.json_,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        )


def asked_form(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What an answer is bound to; None: nothing. Raises InvalidRequestError when both say so."""
    form = None if response_format is None else response_format.asked()
    if structured_outputs is None:
        return form
    if form is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs exclude each other.", param="structured_outputs"
        )
    return structured_outputs.asked()
