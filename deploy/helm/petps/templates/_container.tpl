{{/* What the server and the container that makes the pool have in common. */}}
{{- define "petps.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
env:
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- if .Values.cluster.endpoints }}
  - name: PETPS_SERVER_ADDRESS
    value: $(POD_NAME).{{ include "petps.pods" . }}:{{ .Values.config.server.port }}
  - name: PETPS_CLUSTER_ZONE
    {{- if .zone }}
    value: {{ .zone }}
    {{- else }}
    valueFrom:
      fieldRef:
        fieldPath: metadata.labels['topology.kubernetes.io/zone']
    {{- end }}
  {{- end }}
  {{- with .Values.store.awsCredentialsKey }}
  - name: AWS_SHARED_CREDENTIALS_FILE
    value: /etc/petps/store/{{ . }}
  {{- end }}
  {{- with .Values.store.googleCredentialsKey }}
  - name: GOOGLE_APPLICATION_CREDENTIALS
    value: /etc/petps/store/{{ . }}
  {{- end }}
  {{- with .Values.extraEnv }}{{ toYaml . | nindent 2 }}{{ end }}
resources:
  {{- $resources := deepCopy .Values.resources }}
  {{- with .Values.storage.deviceResource }}
  {{- $resources = mergeOverwrite $resources (dict "limits" (dict . "1")) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
volumeMounts:
  - name: pool
    mountPath: /var/lib/petps
  - name: tmp
    mountPath: /tmp
  - name: config
    mountPath: /etc/petps/config
    readOnly: true
  {{- if include "petps.hasMap" . }}
  - name: shards
    mountPath: /etc/petps/shards
    readOnly: true
  {{- end }}
  {{- range $name := list "tls" "access" "kafka" "store" "cluster" }}
  {{- if (index $.Values $name).existingSecret }}
  - name: {{ $name }}
    mountPath: /etc/petps/{{ $name }}
    readOnly: true
  {{- end }}
  {{- end }}
{{- end }}

{{/*
How the kubelet asks a path. Where every client needs a certificate, it has none: then it runs a
command, which asks the server through the socket beside the pool.
*/}}
{{- define "petps.probe" -}}
{{- if eq .root.Values.tls.clientCertificates "required" }}
exec:
  command:
    - petps
    - status
    - /var/lib/petps/petps.pool
    {{- if eq .path "/readyz" }}
    - --wait
    - "1"
    {{- end }}
{{- else }}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ include "petps.scheme" .root }}
{{- end }}
{{- end }}
