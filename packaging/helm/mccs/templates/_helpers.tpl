{{- define "mccs.labels" -}}
app.kubernetes.io/name: mccs
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "mccs.selector" -}}
app.kubernetes.io/name: mccs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "mccs.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{/* A value of a TOML file: strings and lists of numbers are the same in JSON. */}}
{{- define "mccs.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ $value | toJson }}
{{- end }}
{{- end }}
