{{/*
All take a context made by specdec.tier (root, tier, values, ...), but for specdec.name.
*/}}

{{/* Name of a tier's objects: at most 63 characters, as a DNS label may have. */}}
{{- define "specdec.name" -}}
{{- printf "%s-%s" (.root.Release.Name | trunc 48 | trimSuffix "-") .tier -}}
{{- end }}

{{- define "specdec.selectorLabels" -}}
app.kubernetes.io/name: specdec
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .tier }}
{{- end }}

{{- define "specdec.labels" -}}
{{ include "specdec.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The address of a tier's pods, for a service that resolves the name itself. */}}
{{- define "specdec.address" -}}
dns:///{{ include "specdec.name" . }}:{{ .port }}
{{- end }}
