{{- define "mqtt-nats.name" -}}
{{- if eq .Release.Name .Chart.Name }}{{ .Chart.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "mqtt-nats.selector" -}}
app.kubernetes.io/name: mqtt-nats
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "mqtt-nats.labels" -}}
{{ include "mqtt-nats.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "mqtt-nats.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "mqtt-nats.urls" -}}
{{- $scheme := ternary "tls" "nats" .Values.natsConnection.tls }}
{{- if .Values.natsConnection.urls }}{{ toJson .Values.natsConnection.urls }}
{{- else if .Values.nats.enabled }}{{ list (printf "%s://%s:4222" $scheme .Values.nats.fullnameOverride) | toJson }}
{{- else }}{{ fail "natsConnection.urls is empty, and nats.enabled is false: say where nats-server is" }}{{ end }}
{{- end }}

{{- /* A value as TOML writes it: JSON does for texts, numbers, booleans and lists of them. */ -}}
{{- define "mqtt-nats.settings" -}}
nats = {{ include "mqtt-nats.urls" . }}
nats_user = {{ .Values.credentials.natsUser | toJson }}
{{- if and .Values.natsConnection.tls .Values.natsConnection.caSecret }}
nats_tls_ca = "/etc/mqtt-nats/nats-ca/ca.crt"
{{- end }}
{{- if .Values.users.existingSecret }}
password_file = "/etc/mqtt-nats/users/users"
{{- end }}
{{- if .Values.rules.existingConfigMap }}
acl_file = "/etc/mqtt-nats/rules/acl.toml"
{{- end }}
admin_listen = "0.0.0.0:8080"
{{- if .Values.viewers.existingSecret }}
admin_tokens_file = "/etc/mqtt-nats/viewers/admin-tokens.toml"
{{- end }}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}{{ else }}{{ toJson $value }}{{ end }}
{{- end }}

[[listeners]]
listen = {{ printf "0.0.0.0:%d" (int .Values.service.port) | toJson }}
{{- if .Values.tls.enabled }}
type = "tls"
tls_cert = "/etc/mqtt-nats/tls/tls.crt"
tls_key = "/etc/mqtt-nats/tls/tls.key"
{{- if .Values.tls.clientCASecret }}
tls_client_ca = "/etc/mqtt-nats/client-ca/ca.crt"
{{- end }}
{{- else }}
type = "tcp"
{{- end }}
{{- with .Values.extraSettings }}

{{ . }}
{{- end }}
{{- end }}
