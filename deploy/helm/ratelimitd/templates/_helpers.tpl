{{- /* The name of everything: that of the release, with the chart's if it lacks it. */ -}}
{{- define "ratelimitd.name" -}}
{{- $name := contains "ratelimitd" .Release.Name | ternary .Release.Name (printf "%s-ratelimitd" .Release.Name) -}}
{{- $name | trunc 46 | trimSuffix "-" -}}
{{- end -}}

{{- /* What a network policy selects: nodes and the upgrade. */ -}}
{{- define "ratelimitd.release" -}}
app.kubernetes.io/name: ratelimitd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* What services select: nodes. */ -}}
{{- define "ratelimitd.node" -}}
{{ include "ratelimitd.release" . }}
app.kubernetes.io/component: node
{{- end -}}

{{- define "ratelimitd.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{- /* YAML reads on as true and every number as a float. */ -}}
{{- define "ratelimitd.text" -}}
{{- if kindIs "bool" . }}{{ ternary "on" "off" . }}{{ else if kindIs "float64" . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{- /* The restricted standard, and a number, so that Kubernetes can tell that it is not root. */ -}}
{{- define "ratelimitd.pod" -}}
automountServiceAccountToken: false
# The variables of the service would look like settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "ratelimitd.container" -}}
image: {{ include "ratelimitd.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- /* HTTPS where the HTTP side speaks TLS. Kubernetes does not verify the certificate. */ -}}
{{- define "ratelimitd.scheme" -}}
scheme: {{ eq (include "ratelimitd.text" .Values.settings.HTTP_TLS) "on" | ternary "HTTPS" "HTTP" }}
{{- end -}}

{{- /* Where pods are scraped by their annotations, these say that it is by HTTPS. */ -}}
{{- define "ratelimitd.annotations" -}}
{{- $annotations := .Values.podAnnotations | default dict -}}
{{- if and (hasKey $annotations "prometheus.io/scrape") (eq (include "ratelimitd.text" .Values.settings.HTTP_TLS) "on") -}}
{{- $annotations = merge (dict) $annotations (dict "prometheus.io/scheme" "https") -}}
{{- end -}}
{{- with $annotations -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{- define "ratelimitd.ports" -}}
- name: grpc
  port: 9090
  targetPort: grpc
  {{- if not .Values.tls.secretName }}
  appProtocol: kubernetes.io/h2c
  {{- end }}
- name: http
  port: 8080
  targetPort: http
{{- end -}}
