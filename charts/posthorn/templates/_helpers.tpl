{{- define "posthorn.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "posthorn.fullname" -}}
{{- range list "image" "podSecurityContext" "containerSecurityContext" "crds" "rbac" "adminAuth" "replication" "operator" "dispatcher" "service" "tls" "ingress" "httpRoute" "networkPolicy" "tracing" "monitoring" "extraObjects" }}
{{- if not (hasKey $.Values .) }}
{{- fail (printf "the value %s is missing: it is null, or the release's values are those of an older chart; use helm upgrade --reset-then-reuse-values instead of --reuse-values" .) }}
{{- end }}
{{- end }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "posthorn.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "posthorn.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The pod selector of a component; it never changes within a release. */}}
{{- define "posthorn.selector" -}}
app.kubernetes.io/name: posthorn
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The labels of an object: those of the chart, .labels and commonLabels. */}}
{{- define "posthorn.labels" -}}
{{- $own := include "posthorn.selector" . | fromYaml }}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- toYaml (merge $own (default (dict) .labels) (default (dict) .root.Values.commonLabels)) }}
{{- end }}

{{/* The metadata of an object: dict "root" . "component" c "name" n. "cluster" true is for
a cluster-scoped object, whose name contains the namespace. */}}
{{- define "posthorn.metadata" -}}
{{- if .cluster -}}
name: {{ .root.Release.Namespace }}-{{ .name }}
{{- else -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
  {{- include "posthorn.labels" . | nindent 2 }}
{{- $annotations := mergeOverwrite (dict) (default (dict) .root.Values.commonAnnotations) (default (dict) .annotations) }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* global.imageRegistry replaces the registry of the repository: its first part, if that is a host. */}}
{{- define "posthorn.image" -}}
{{- $i := .Values.image -}}
{{- $repository := $i.repository -}}
{{- with (default (dict) .Values.global).imageRegistry }}{{ $repository = printf "%s/%s" . (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "") }}{{ end -}}
{{- if $i.digest }}{{ $repository }}@{{ $i.digest }}{{ else }}{{ $repository }}:{{ default .Chart.AppVersion $i.tag }}{{ end }}
{{- end }}

{{- define "posthorn.serviceAccount" -}}
{{- $own := printf "%s-%s" (include "posthorn.fullname" .root) .component -}}
{{- default $own (index .root.Values .component).serviceAccount.name }}
{{- end }}

{{/* Creates the ServiceAccount of a component: true or nothing. Default: unless it has a name. */}}
{{- define "posthorn.ownAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount }}
{{- if kindIs "invalid" $account.create }}{{ if not $account.name }}true{{ end }}{{ else if $account.create }}true{{ end }}
{{- end }}

{{/* The Secret with the certificate for calls, or nothing without TLS. */}}
{{- define "posthorn.tlsSecret" -}}
{{- if .Values.tls.secretName }}{{ .Values.tls.secretName }}{{ else if .Values.tls.certManager.enabled }}{{ include "posthorn.fullname" . }}-calls-tls{{ end }}
{{- end }}

{{/* The fields shared by the pods of both components. */}}
{{- define "posthorn.podCommon" -}}
{{- $c := index .root.Values .component -}}
serviceAccountName: {{ include "posthorn.serviceAccount" . }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
topologySpreadConstraints:
{{- if $c.topologySpreadConstraints }}
  {{- toYaml $c.topologySpreadConstraints | nindent 0 }}
{{- else }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "posthorn.selector" $ | nindent 6 }}
{{- end }}
{{- end }}
{{- with include "posthorn.fields" (list $c "nodeSelector" "tolerations" "affinity" "priorityClassName" "dnsPolicy" "dnsConfig" "hostAliases" "initContainers") }}
{{ . }}
{{- end }}
{{- end }}

{{/* The fields of an object with these names that are set, or nothing: list object names. */}}
{{- define "posthorn.fields" -}}
{{- $object := first . }}
{{- $set := dict }}
{{- range $name := rest . }}
{{- with index $object $name }}{{ $_ := set $set $name . }}{{ end }}
{{- end }}
{{- with $set }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "posthorn.env" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
{{- with (index .root.Values .component).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The probes of a container with the times of its values: list values names. */}}
{{- define "posthorn.probes" -}}
{{- $values := first . }}
{{- $probes := dict }}
{{- range $probe := rest . }}
{{- $get := dict "path" (ternary "/readyz" "/healthz" (eq $probe "readinessProbe")) "port" "probes" }}
{{- $_ := set $probes $probe (merge (dict "httpGet" $get) (index $values $probe)) }}
{{- end }}
{{- toYaml $probes }}
{{- end }}
