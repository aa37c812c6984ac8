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
{{/* service.config of the values: its sections are those of service.toml that are the same on all nodes, and are spelt so. */}}
{{- define "mccs.config" -}}
{{- $sections := list "[limits]" "[runtime]" "[runtime.cpus]" "[host_device]" "[cuda]" "[strategy]" "[[strategy.path]]" "[metrics.otlp]" "[metrics.otlp.attributes]" "[observers]" "[tcp]" "[rdma]" "[[tenant]]" "[tenant.labels]" }}
{{- $written := list "service" "metrics" }}
{{- $of_a_node := list "host" "exchange" "controller" "store" }}
{{- $lines := splitList "\n" .Values.service.config }}
{{- $is_in_section := false }}
{{- range $lines }}
{{- $line := regexReplaceAll "[ \t\r]*(#.*)?$" . "" | trim }}
{{- if hasPrefix "[" $line }}
{{- $is_in_section = true }}
{{- $header := regexReplaceAll "[ \t\"']" $line "" }}
{{- $name := regexReplaceAll "[^A-Za-z0-9_-].*$" (trimAll "[]" $header) "" }}
{{- if has $header $sections }}
{{- else if has $name $written }}
{{- fail (printf "service.config has %s, which the chart writes itself: runtimeDir and metrics are values of their own" $line) }}
{{- else if has $name $of_a_node }}
{{- fail (printf "service.config has %s: nodes of a cluster have names, keys and addresses of their own; run the service as a unit, with service.enabled=false" $line) }}
{{- else }}
{{- fail (printf "service.config has %s, which is no section of service.toml; there are %s" $line (join " " $sections)) }}
{{- end }}
{{- else if and $line (not $is_in_section) }}
{{- fail (printf "service.config begins with a section, such as [limits], not with %q" $line) }}
{{- end }}
{{- end }}
{{- .Values.service.config }}
{{- end }}
