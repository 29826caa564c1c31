export function openDashboard() {
  return { show() {} };
}
