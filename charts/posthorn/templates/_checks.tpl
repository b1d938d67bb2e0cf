{{/* The seconds of a Go duration. dateModify is the only function that parses durations. */}}
{{- define "posthorn.seconds" -}}
{{- $start := toDate "2006" "2000" -}}
{{- sub (unixEpoch ($start | dateModify .)) (unixEpoch $start) -}}
{{- end }}

{{/* Fails for values that the schema cannot check: the program would not start, or Kubernetes would
reject an object without the reason. */}}
{{- define "posthorn.checks" -}}
{{- $c := .Values.ceilings }}
{{- if or (lt (include "posthorn.seconds" $c.deliveryTimeout | int) 5) (gt (include "posthorn.seconds" $c.deliveryTimeout | int) 60) }}
{{- fail (printf "ceilings.deliveryTimeout is %s: set 5s to 60s" $c.deliveryTimeout) }}
{{- end }}
{{- if or (lt (include "posthorn.seconds" $c.retryWindow | int) 14400) (gt (include "posthorn.seconds" $c.retryWindow | int) 2592000) }}
{{- fail (printf "ceilings.retryWindow is %s: set 4h to 720h" $c.retryWindow) }}
{{- end }}
{{- $name := printf "%s-dispatcher" (include "posthorn.fullname" .) }}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace $name }}
{{- $volumes := not (empty .spec.volumeClaimTemplates) }}
{{- if ne $volumes (and (eq $.Values.replication.type "Volume") $.Values.dispatcher.persistence.enabled) }}
{{- fail (printf "StatefulSet %s was installed %s volumes, and Kubernetes permits no change of this: restore replication.type and dispatcher.persistence.enabled, or uninstall the release and install it again. See docs/replication.md, Change the type" $name (ternary "with" "without" $volumes)) }}
{{- end }}
{{- end }}
{{- end }}
