{{- define "petps.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "petps.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "petps.labels" -}}
{{ include "petps.selector" . }}
{{ include "petps.releaseLabels" . }}
{{- end }}

{{- define "petps.releaseLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The name of the pod of an ordinal, as the shard map and the pod itself write it. */}}
{{- define "petps.pods" -}}
{{ include "petps.name" . }}-pods.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{- define "petps.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}
{{- else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}{{ end }}
{{- end }}

{{/* Whether the chart writes a shard map. In a cluster, the controller does. */}}
{{- define "petps.hasMap" -}}
{{- if not .Values.cluster.endpoints }}
{{- if or (gt (int .Values.replicas) 1) .Values.shardMap.servers }}yes{{ end }}
{{- end }}
{{- end }}

{{/* The labels of controllers and of routers. The selector of servers must not select them. */}}
{{- define "petps.controllerSelector" -}}
{{ include "petps.partSelector" (dict "root" . "part" "controller") }}
{{- end }}

{{- define "petps.controllerLabels" -}}
{{ include "petps.partLabels" (dict "root" . "part" "controller") }}
{{- end }}

{{- define "petps.routerSelector" -}}
{{ include "petps.partSelector" (dict "root" . "part" "router") }}
{{- end }}

{{- define "petps.routerLabels" -}}
{{ include "petps.partLabels" (dict "root" . "part" "router") }}
{{- end }}

{{- define "petps.partSelector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "petps.partLabels" -}}
{{ include "petps.partSelector" . }}
{{ include "petps.releaseLabels" .root }}
{{- end }}

{{- define "petps.scheme" -}}
{{- if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{/* The configuration: that of the values, and the paths of what is mounted. As JSON. */}}
{{- define "petps.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $pool := dict "path" "/var/lib/petps/petps.pool" }}
{{- if eq .Values.storage.medium "device" }}
{{- $pool = dict "path" .Values.storage.device "folder" "/var/lib/petps" }}
{{- end }}
{{- $added := dict "pool" $pool }}
{{- if .Values.tls.existingSecret }}
{{- $tls := dict "certificate" "/etc/petps/tls/tls.crt" "key" "/etc/petps/tls/tls.key" }}
{{- if ne .Values.tls.clientCertificates "off" }}
{{- $_ := set $tls "client_certificates" .Values.tls.clientCertificates }}
{{- $_ := set $tls "client_ca" "/etc/petps/tls/ca.crt" }}
{{- end }}
{{- $_ := set $added "tls" $tls }}
{{- end }}
{{- if .Values.access.existingSecret }}
{{- $_ := set $added "access" (dict "file" "/etc/petps/access/access.json") }}
{{- end }}
{{- with .Values.cluster }}
{{- if .endpoints }}
{{- $cluster := dict "endpoints" .endpoints }}
{{- if .existingSecret }}
{{- $_ := set $cluster "ca" "/etc/petps/cluster/ca.crt" }}
{{- end }}
{{- if .clientCertificate }}
{{- $_ := set $cluster "certificate" "/etc/petps/cluster/tls.crt" }}
{{- $_ := set $cluster "key" "/etc/petps/cluster/tls.key" }}
{{- end }}
{{- if .user }}
{{- $_ := set $cluster "user" .user }}
{{- $_ := set $cluster "password_file" "/etc/petps/cluster/password" }}
{{- end }}
{{- $_ := set $added "cluster" $cluster }}
{{- end }}
{{- end }}
{{- mergeOverwrite $config $added | toJson }}
{{- end }}

{{/*
A section of petps.toml: {name, content}. First its keys, then the sections in it. Texts, numbers
and lists are written in the same way in JSON and in TOML; a number of Helm's own TOML would get
".0", which is not a whole number there.
*/}}
{{- define "petps.section" -}}
{{- $name := .name }}
{{- if $name }}
[{{ $name }}]
{{ end }}
{{- range $key, $value := .content }}
{{- if and (not (kindIs "map" $value)) (not (kindIs "invalid" $value)) }}
{{ $key | quote }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{ range $key, $value := .content }}
{{- if kindIs "map" $value }}
{{- $section := $key | quote }}
{{- if $name }}{{ $section = printf "%s.%s" $name $section }}{{ end }}
{{- include "petps.section" (dict "name" $section "content" $value) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What values.schema.json cannot say. */}}
{{- define "petps.check" -}}
{{- $server := .Values.config.server }}
{{- $tls := .Values.tls }}
{{- if and (not .Values.config.tables) .Values.storage.create }}
{{- fail "config.tables is empty: name the tables of the new pool, such as items: {dim: 64, capacity: 1000000}" }}
{{- end }}
{{- if not $server.insecure }}
{{- if not $tls.existingSecret }}
{{- fail "tls.existingSecret is missing: name a Secret with tls.crt and tls.key, or accept plain text with config.server.insecure=true" }}
{{- end }}
{{- if not (or .Values.access.existingSecret (eq $tls.clientCertificates "required")) }}
{{- fail "access.existingSecret is missing: name a Secret with access.json (`petps token` writes it), set tls.clientCertificates=required, or accept every caller with config.server.insecure=true" }}
{{- end }}
{{- end }}
{{- if and (ne $tls.clientCertificates "off") (not $tls.existingSecret) }}
{{- fail "tls.clientCertificates needs tls.existingSecret, with ca.crt" }}
{{- end }}
{{- if and (eq $tls.clientCertificates "required") (eq .Values.storage.medium "device") }}
{{- fail "tls.clientCertificates=required with storage.medium=device leaves no probe: the kubelet has no certificate, and a device has no socket beside it. Use \"optional\" and an access file" }}
{{- end }}
{{- if and (eq $tls.clientCertificates "required") .Values.monitoring.serviceMonitor.enabled }}
{{- fail "tls.clientCertificates=required with monitoring.serviceMonitor.enabled leaves Prometheus without a certificate. Use \"optional\" and an access file" }}
{{- end }}
{{- range $key, $value := .Values.config.kafka }}
{{- if and (regexMatch "(?i)password|passphrase|secret|token|jaas|key\\.pem|private\\.key|oauthbearer\\.config" $key) (not (regexMatch "(?i)[._](file|location|url)$" $key)) }}
{{- fail (printf "config.kafka: %q would be readable in a ConfigMap: put it into the Secret kafka.existingSecret, and name its file with \"%s.file\"" $key $key) }}
{{- end }}
{{- end }}
{{- if and .Values.router.replicas (eq $tls.clientCertificates "required") }}
{{- fail "router.replicas with tls.clientCertificates=required: a router cannot pass on the certificates of its callers. Use \"optional\" and an access file" }}
{{- end }}
{{- $servers := len .Values.shardMap.servers }}
{{- if and $servers (ne $servers (int .Values.replicas)) }}
{{- fail (printf "shardMap.servers has %d entries, and replicas is %d: give each pod one entry" $servers (int .Values.replicas)) }}
{{- end }}
{{- with .Values.cluster }}
{{- if not .endpoints }}
{{- range $key := list "existingSecret" "clientCertificate" "user" "zones" "upgradeZones" "stopDrainSeconds" }}
{{- if index $.Values.cluster $key }}
{{- fail (printf "cluster.%s is of a cluster: name its etcd with cluster.endpoints" $key) }}
{{- end }}
{{- end }}
{{- if $.Values.config.cluster }}
{{- fail "config.cluster is of a cluster: name its etcd with cluster.endpoints" }}
{{- end }}
{{- end }}
{{- if and .endpoints $.Values.shardMap.servers }}
{{- fail "shardMap.servers and cluster.endpoints both give a shard map: leave shardMap.servers out, and write the map with `petps cluster init`" }}
{{- end }}
{{- if and (or .clientCertificate .user) (not .existingSecret) }}
{{- fail "cluster.existingSecret is missing: cluster.user needs its password, and cluster.clientCertificate its tls.crt and tls.key" }}
{{- end }}
{{- range .upgradeZones }}
{{- if not (has . $.Values.cluster.zones) }}
{{- fail (printf "cluster.upgradeZones has %q, which is not in cluster.zones" .) }}
{{- end }}
{{- end }}
{{- range .endpoints }}
{{- if and (hasPrefix "http://" .) (not $server.insecure) }}
{{- fail (printf "cluster.endpoints has %s: who can change what etcd is sent decides which pod answers for which key. Write https://, or accept plain text with config.server.insecure=true" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
