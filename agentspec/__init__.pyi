# What `agentspec` exports and where each name lives: read by type checkers, and at run time by lazy_loader.
from .cache import SuffixCache as SuffixCache
from .client import achat as achat
from .client import agenerate as agenerate
from .client import chat as chat
from .client import generate as generate
from .errors import (
    AgentSpecError as AgentSpecError,
)
from .errors import (
    AnswerMemoryError as AnswerMemoryError,
)
from .errors import (
    AuthenticationError as AuthenticationError,
)
from .errors import (
    CacheClosedError as CacheClosedError,
)
from .errors import (
    CacheDamagedError as CacheDamagedError,
)
from .errors import (
    CacheError as CacheError,
)
from .errors import (
    CacheFormatError as CacheFormatError,
)
from .errors import (
    CacheLockedError as CacheLockedError,
)
from .errors import (
    CacheNamespaceError as CacheNamespaceError,
)
from .errors import (
    CacheUnavailableError as CacheUnavailableError,
)
from .errors import (
    CacheVersionError as CacheVersionError,
)
from .errors import (
    ConfigurationError as ConfigurationError,
)
from .errors import (
    ContextLengthError as ContextLengthError,
)
from .errors import (
    EngineError as EngineError,
)
from .errors import (
    EngineStoppedError as EngineStoppedError,
)
from .errors import (
    HeadersTooLargeError as HeadersTooLargeError,
)
from .errors import (
    HostNotAllowedError as HostNotAllowedError,
)
from .errors import (
    InvalidRequestError as InvalidRequestError,
)
from .errors import (
    KnowledgeBaseError as KnowledgeBaseError,
)
from .errors import (
    ModelNotFoundError as ModelNotFoundError,
)
from .errors import (
    ModelUnavailableError as ModelUnavailableError,
)
from .errors import (
    NoServerError as NoServerError,
)
from .errors import (
    NotReadyError as NotReadyError,
)
from .errors import (
    OriginNotAllowedError as OriginNotAllowedError,
)
from .errors import (
    OverloadedError as OverloadedError,
)
from .errors import (
    OverRateLimitError as OverRateLimitError,
)
from .errors import (
    PermissionDeniedError as PermissionDeniedError,
)
from .errors import (
    RateLimitError as RateLimitError,
)
from .errors import (
    RequestTimeoutError as RequestTimeoutError,
)
from .errors import (
    RequestTooLargeError as RequestTooLargeError,
)
from .errors import (
    ShuttingDownError as ShuttingDownError,
)
from .errors import (
    SlowClientError as SlowClientError,
)
from .errors import (
    UpstreamAuthenticationError as UpstreamAuthenticationError,
)
from .errors import (
    UpstreamError as UpstreamError,
)
from .errors import (
    UpstreamIsolationError as UpstreamIsolationError,
)
from .errors import (
    UpstreamStatusError as UpstreamStatusError,
)
from .errors import (
    UpstreamTimeoutError as UpstreamTimeoutError,
)
from .langchain import ChatAgentSpec as ChatAgentSpec
from .protocol.policy import StepPolicy as StepPolicy
from .reasoning.retrieval.ralmspec import ralmspec as ralmspec
from .runtime import Runtime as Runtime
from .settings.load import (
    Settings as Settings,
)
from .settings.load import (
    load_settings as load_settings,
)
from .step.decorator import (
    step as step,
)
from .step.report import (
    async_httpx_hooks as async_httpx_hooks,
)
from .step.report import (
    headers as headers,
)
from .step.report import (
    httpx_hooks as httpx_hooks,
)
from .step.report import (
    report as report,
)
from .step.scope import (
    current_labels as current_labels,
)
from .step.scope import (
    current_model as current_model,
)
from .step.scope import (
    current_policy as current_policy,
)
from .step.scope import (
    keep_labels as keep_labels,
)
from .step.scope import (
    workflow as workflow,
)
from .types import (
    Delta as Delta,
)
from .types import (
    Draft as Draft,
)
from .types import (
    FinishReason as FinishReason,
)
from .types import (
    GenerateRequest as GenerateRequest,
)
from .types import (
    Labels as Labels,
)
from .types import (
    Message as Message,
)
from .types import (
    Namespace as Namespace,
)
from .types import (
    Prompt as Prompt,
)
from .types import (
    SamplingParams as SamplingParams,
)
from .types import (
    Source as Source,
)
from .types import (
    Speculation as Speculation,
)
from .types import (
    StructuredOutputs as StructuredOutputs,
)
from .types import (
    TokenLogprob as TokenLogprob,
)
from .types import (
    Usage as Usage,
)
from .version import __version__ as __version__
