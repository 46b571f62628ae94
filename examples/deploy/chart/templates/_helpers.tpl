{{- define "agentspec.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "agentspec.selector" -}}
app.kubernetes.io/name: agentspec
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "agentspec.labels" -}}
{{ include "agentspec.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "agentspec.container" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{/* PostgreSQL's address; empty where there is none. */}}
{{- define "agentspec.database" -}}
{{- with .Values.postgresql -}}
{{- $host := .host -}}
{{- if and (not $host) .enabled -}}{{- $host = printf "%s-postgres" (include "agentspec.name" $) -}}{{- end -}}
{{- if $host -}}postgresql://{{ .user }}@{{ $host }}:{{ .port }}{{- end -}}
{{- end -}}
{{- end -}}
